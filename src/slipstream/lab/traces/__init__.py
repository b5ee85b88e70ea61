"""Reading traces that others made: files in, `Reading` (and its `CycleCost`) out.

kineto, nsys   files -> timelines: one rank's GPU events, host calls and annotations as columns
kernels, marks what a kernel's or an annotation's name says
steps          which step and cycle each kernel belongs to
waits          how each microsecond of the GPU was spent, and what it waited for
ranks          ranks beside each other: wire time and skew
reading        all of it together
"""

from slipstream.lab.traces.reading import Reading, StepKind, read_traces

__all__ = ["Reading", "StepKind", "read_traces"]
