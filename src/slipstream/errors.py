"""Errors that a user can act on. The CLI prints them as one line; anything else is a defect of ours."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Something the user asked for cannot be done; the message says in one line what, why and what to do."""


class ModelError(SlipstreamError):
    """A model that is unknown, incomplete, damaged or not supported."""


class RequestError(SlipstreamError, ValueError):
    """A request that cannot be served: too long, empty, or with an option that is out of range or unsupported."""


class DataError(SlipstreamError):
    """Training data that is broken or cannot be read or written; the message names the file, and the line in it."""


class MachineError(SlipstreamError):
    """A machine that is unknown, described wrongly or not known well enough; the message says what is missing."""


class RankError(SlipstreamError):
    """A rank that died, disagrees, or does not answer; the message says which rank, and in which operation."""
