"""EAGLE-3 (arXiv 2503.01840): a drafter of one layer that reads the target's own states."""
