"""slipstream: makes speculative decoding pay."""
