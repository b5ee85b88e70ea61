"""Options that other engines have and this one does not: refused by name."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from slipstream.errors import RequestError

UNSUPPORTED = {
    "--presence-penalty": "penalties are not supported yet",
    "--frequency-penalty": "penalties are not supported yet",
    "--repetition-penalty": "penalties are not supported yet",
    "--repeat-penalty": "penalties are not supported yet",
    "--logit-bias": "changing single logits is not supported yet",
    "--logprobs": "log-probabilities are not supported yet",
    "--top-logprobs": "log-probabilities are not supported yet",
    "--grammar": "grammars are not supported yet",
    "--json-schema": "grammars are not supported yet",
    "--guided-json": "grammars are not supported yet",
    "--response-format": "grammars are not supported yet",
    "--min-p": "min-p sampling is not supported yet; --top-p and --top-k are",
    "--n": "several answers to one prompt are not supported yet; run the command again with another --seed",
}
"""Options that people expect: refused by name, because an option that is ignored gives a wrong answer silently."""


class RefusesUnsupported(TyperCommand):
    """A command that names what it cannot do instead of calling it unknown."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Looks for unsupported options first."""
        before_end = args[: args.index("--")] if "--" in args else args
        for arg in before_end:
            name = arg.split("=", 1)[0]
            if name in UNSUPPORTED:
                raise RequestError(f"{name}: {UNSUPPORTED[name]}")
        return super().parse_args(ctx, args)
