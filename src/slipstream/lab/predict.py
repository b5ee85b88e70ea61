"""What a cycle would cost: from the shape of a model, the ceilings of a machine and the settings.

Every part of a pass takes the longer of two times: reading its bytes at the machine's bandwidth, and doing its
operations at the machine's rate (a roofline). What an engine reaches of the ceilings are its `Shares`, which can be
fitted to measured steps (`lab.shares`). To that come the launches:

- on a CPU the host is the device, so every operation's overhead adds to its part;
- in a CUDA graph every kernel leaves a small gap behind it;
- launched one by one, the device waits where the host takes longer to launch the pass than the device to run it.

An all-reduce costs what the machine's measured curve says for its size: captured, that is the wire; what an eager one
takes more is skew, the wait for ranks whose launches come later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.errors import RequestError
from slipstream.lab.cycle_cost import CycleCost, Part, Phase, Traffic, ordered
from slipstream.machine.curve import AllReduceCurve
from slipstream.machine.machine import Machine
from slipstream.target.shape import Collective, ModelShape, WeightBytes

Draft = Literal["none", "ngram", "eagle3"]
VALUE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}

# Operations (kernels) of a lean engine, by part: where a graph has gaps and a host has launches.
_ATTENTION_OPS = 5
"""A layer: the projection of q, k and v; rotation; writing the KV; attention; the projection back."""
_LATENT_OPS = 10
"""A layer of latent attention: two projections down, two norms, two up, rotation, writing, attention, value, back."""
_MLP_OPS = 3
_MOE_OPS = 8
"""A layer: router, choice, two of ordering, two grouped products, activation, weighted sum."""
_NORM_OPS = 2
"""A layer: each with the addition of the residual in it."""
_ACCEPT_OPS, _COMMIT_OPS, _NGRAM_OPS = 4, 6, 4
_DRAFT_OPS = 14
"""A pass of an EAGLE-3 drafter: one layer, its head, the choice of candidates."""


@dataclass(frozen=True)
class Shares:
    """How much of a machine's ceilings the engine reaches. Launches scale the launch overhead.

    The defaults are those of a good engine on GPUs: vLLM and SGLang on an H200 (Llama-3.1-8B, 4.8 to 5.0 ms a token)
    reach 0.77 of what copies reach, and products of few rows are bound by memory anyway.
    """

    memory: float = 0.85
    matrix: float = 0.6
    scores: float = 0.3
    """Of the matrix rate, in attention's scores and values."""
    launches: float = 1.0


@dataclass(frozen=True)
class Settings:
    """How a cycle is run."""

    weights: WeightBytes
    """Bytes of a weight by where it is."""
    drafted: int = 0
    """Tokens that one request verifies beside its own; 0 is plain decoding."""
    depth: int = 0
    """Passes of the drafter."""
    batch: int = 1
    """Requests in one pass."""
    context: int = 1024
    dtype: str = "bfloat16"
    """Of activations and KV."""
    tp: int = 1
    backend: str = "nccl"
    """Of the all-reduce: one whose curve the machine knows."""
    setting: str | None = None
    """Which of the machine's curves, where it has several."""
    curve: AllReduceCurve | None = None
    """A curve of its own instead of the machine's, for what nobody measured there."""
    captured: bool = False
    """The verify step is one CUDA graph."""
    skew_us: float | None = None
    """How long one eager collective waits for the slowest rank, whoever carries it: launches come late, not messages.
    None: what the machine's eager curve takes more than the captured one."""
    draft_captured: bool = False
    threads: int | None = None
    """Of one rank, on a CPU."""
    draft: Draft = "none"
    draft_vocab: int = 32_000
    """Tokens that the drafter can propose."""
    host_us: float = 0.0
    """The host's work and waits between the steps of a cycle."""
    gap_us: float = 0.0
    """Time that the device was seen to wait for launches beyond what is predicted; a captured step has none of it."""
    fused_norm: bool = False
    """The all-reduce adds the residual and norms in the same kernel."""
    replicated_attention: bool = False
    """Every rank computes all of attention: it needs no all-reduce."""
    wire_scale: float = 1.0
    """Bytes on the wire over those of the activations (quantised: about a half)."""
    stages: int = 1
    """Pipeline stages, one after the other, of `tp` ranks each."""

    @property
    def rows(self) -> int:
        """Of the verify step."""
        return self.batch * (self.drafted + 1)

    def plain(self) -> Settings:
        """The same without speculation."""
        return replace(self, drafted=0, depth=0, draft="none")


def predict(
    machine: Machine, shape: ModelShape, settings: Settings, shares: Shares | None = None
) -> CycleCost:
    """The cost of one cycle. Raises MachineError where the machine does not say enough."""
    return _Prediction(machine, shape, settings, shares or Shares()).cost()


@dataclass(frozen=True)
class _Prediction:
    """The parts of one prediction."""

    machine: Machine
    shape: ModelShape
    settings: Settings
    shares: Shares

    def cost(self) -> CycleCost:
        """All phases together."""
        if self.settings.dtype not in VALUE_BYTES:
            raise RequestError(f"no prediction for {self.settings.dtype}; float32 and bfloat16 are known")
        parts = [*self._draft(), *self._verify(), *self._small("accept", _ACCEPT_OPS)]
        parts += self._small("commit", _COMMIT_OPS)
        if self.settings.host_us:
            parts.append(Part("host", "host", self.settings.host_us, "host"))
        return CycleCost(
            ordered(parts),
            rows=self.settings.rows,
            tokens=None,
            cycles=0,
            source="predicted",
            ranks=self.settings.tp * self.settings.stages,
            evidence=tuple(self._evidence()),
        )

    def _verify(self) -> list[Part]:
        ops = self._ops()
        work = {"embed": 0.0, "norm": 0.0} | self._work()
        compute = [
            Part("verify", name, us + self._host_us(ops[name]), count=ops[name])
            for name, us in work.items()
            if us or ops[name]
        ]
        traffic = self._collectives("verify", self._calls(), self.settings.captured)
        busy_us = sum(part.us for part in (*compute, *traffic))
        return [*compute, *traffic, *self._gaps("verify", sum(ops.values()), busy_us, self.settings.captured)]

    def _work(self) -> dict[str, float]:
        """Microseconds of reading and multiplying, by part; one rank's share."""
        settings, shape = self.settings, self.shape
        rows, stored = settings.rows, settings.weights
        zero = WeightBytes(0, 0, 0, 0, 0)
        router = shape.weight_bytes(rows, zero)
        weight_bytes = {
            "attention": shape.weight_bytes(rows, replace(zero, attention=stored.attention)) - router,
            "mlp": shape.weight_bytes(rows, replace(zero, mlp=stored.mlp)) - router,
            "moe": shape.weight_bytes(
                rows, replace(zero, experts=stored.experts, shared_experts=stored.shared_experts)
            ),
            "lm_head": shape.weight_bytes(rows, replace(zero, head=stored.head)) - router,
        }
        flops = shape.flops_by_part(rows, settings.context)
        work = {
            part: self._roofline(
                count * self._share(part), flops[part] * self._share(part), self.shares.matrix
            )
            for part, count in weight_bytes.items()
        }
        kv = shape.kv_bytes_per_token(VALUE_BYTES[settings.dtype]) * settings.context * settings.batch
        work["attention"] += self._roofline(
            kv * self._kv_share(), flops["scores"] * self._share("attention"), self.shares.scores
        )
        return work

    def _share(self, part: str) -> float:
        """What the busiest rank has of a part's weights."""
        tp, shape = self.settings.tp, self.shape
        if part != "attention":
            return 1 / tp
        if self.settings.replicated_attention:
            return 1.0
        heads = shape.heads if shape.latent or shape.kv_heads < tp else shape.kv_heads
        return -(-heads // tp) / heads  # heads are not split: with 3 of them, one of 2 ranks has 2

    def _kv_share(self) -> float:
        """A latent is every rank's; KV heads are shared as far as there are enough."""
        if self.shape.latent:
            return 1.0
        return max(self._share("attention"), 1 / self.shape.kv_heads)

    def _roofline(self, read_bytes: float, flops: float, matrix_share: float) -> float:
        settings, machine = self.settings, self.machine
        ranks = settings.tp * settings.stages
        bandwidth = machine.memory_read(ranks, settings.threads).value * self.shares.memory
        rate = machine.matrix_rate(settings.dtype, ranks, settings.threads).value * matrix_share
        return max(read_bytes / bandwidth, flops / rate) * 1e6

    def _ops(self) -> dict[str, int]:
        """Operations of the verify step by part."""
        shape = self.shape
        sparse = len(shape.experts.layers) if shape.experts else 0
        shared = bool(shape.experts and shape.experts.shared_intermediate_size)
        norms = 0 if self.settings.fused_norm and self.settings.tp > 1 else _NORM_OPS * shape.layers
        return {
            "embed": 1,
            "attention": shape.layers * (_LATENT_OPS if shape.latent else _ATTENTION_OPS + shape.qk_norm),
            "mlp": (shape.layers - sparse) * _MLP_OPS,
            "moe": sparse * (_MOE_OPS + (_MLP_OPS + 1) * shared),
            "norm": norms + 1,
            "lm_head": 1,
        }

    def _calls(self) -> list[Collective]:
        """The collectives of the verify step."""
        settings = self.settings
        calls = self.shape.collectives(settings.rows, settings.tp, VALUE_BYTES[settings.dtype])
        if settings.replicated_attention:
            calls = [call for call in calls if call.place != "attention"]
        return calls

    def _collectives(self, phase: Phase, calls: list[Collective], captured: bool) -> list[Part]:
        """One part for each kind and size."""
        counts: dict[tuple[str, int], int] = {}
        for call in calls:
            counts[call.kind, call.bytes] = counts.get((call.kind, call.bytes), 0) + 1
        parts = [
            self._collective(phase, kind, size, count, captured) for (kind, size), count in counts.items()
        ]
        if phase == "verify" and self.settings.stages > 1:
            size = self.settings.rows * self.shape.hidden_size * VALUE_BYTES[self.settings.dtype]
            us = self._all_reduce_us(size, True)  # at most: an all-reduce holds more than one such transfer
            hops = self.settings.stages - 1
            parts.append(
                Part("verify", "send_recv", us * hops, "collective", hops, Traffic(size, us * hops, 0.0))
            )
        return parts

    def _collective(self, phase: Phase, kind: str, size: int, count: int, captured: bool) -> Part:
        # A ring's all-gather is the second half of its all-reduce of the whole message.
        whole, part = (size, 1.0) if kind == "all_reduce" else (size * self.settings.tp, 0.5)
        wire = self._all_reduce_us(whole, True) * part * count
        skew = 0.0
        if self.machine.has_gpus and not captured:
            skew = self._skew_us(whole, part, wire / count) * count
        by = " ".join(filter(None, (self.settings.backend, self.settings.setting)))
        return Part(phase, kind, wire + skew, "collective", count, Traffic(size, wire, skew, by=by))

    def _skew_us(self, whole: int, part: float, wire_us: float) -> float:
        """Of one eager call on GPUs."""
        if self.settings.skew_us is not None:
            return self.settings.skew_us
        if self.settings.curve:
            return 0.0
        return max(self._all_reduce_us(whole, False) * part - wire_us, 0.0)

    def _all_reduce_us(self, size: int, captured: bool) -> float:
        settings = self.settings
        on_wire = round(size * settings.wire_scale)
        if settings.curve:
            return settings.curve.us(on_wire)
        captured = captured and self.machine.has_gpus
        return self.machine.all_reduce_us(
            on_wire, settings.tp, settings.backend, captured, settings.setting
        ).value

    def _draft(self) -> list[Part]:
        settings = self.settings
        if settings.draft == "none" or not settings.drafted:
            return []
        if settings.draft == "ngram":
            return self._small("draft", _NGRAM_OPS)
        return self._eagle3()

    def _eagle3(self) -> list[Part]:
        """As many passes as the draft is deep, each over one layer of the target's width and the drafter's own head."""
        shape, settings = self.shape, self.settings
        heads = shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
        weights = shape.hidden_size * (
            2 * heads + shape.heads * shape.head_dim + 3 * shape.intermediate_size
        ) + shape.hidden_size * min(settings.draft_vocab, shape.vocab_size)
        read = weights * min(2.0, settings.weights.attention) / settings.tp
        flops = 2 * weights * settings.batch / settings.tp
        passes = settings.depth
        us = self._roofline(read, flops, self.shares.matrix) * passes
        ops = _DRAFT_OPS * passes
        parts = [Part("draft", "draft", us + self._host_us(ops), count=passes)]
        if settings.tp > 1:
            size = settings.batch * shape.hidden_size * VALUE_BYTES[settings.dtype]
            reduces = [Collective("all_reduce", size, None, "mlp")] * (2 * passes)
            parts += self._collectives("draft", reduces, settings.draft_captured)
        busy_us = sum(part.us for part in parts)
        return [*parts, *self._gaps("draft", ops, busy_us, settings.draft_captured)]

    def _small(self, phase: Phase, ops: int) -> list[Part]:
        """A few operations on little data: nothing but launches."""
        return [Part(phase, phase, self._launch_us(captured=False) * ops, count=ops)]

    def _host_us(self, ops: int) -> float:
        """On a CPU operations wait for their launch one by one."""
        return 0.0 if self.machine.has_gpus else ops * self._launch_us(captured=False)

    def _gaps(self, phase: Phase, ops: int, busy_us: float, captured: bool) -> list[Part]:
        """Where a GPU waits for its next kernel."""
        if not self.machine.has_gpus:
            return []
        launches = ops * self._launch_us(captured)
        us = launches if captured else max(launches - busy_us, 0.0)
        if phase == "verify" and not captured:
            us += self.settings.gap_us
        return [Part(phase, "launch", us, "launch_gap", ops)] if us else []

    def _launch_us(self, captured: bool) -> float:
        return self.machine.launch_us(captured and self.machine.has_gpus).value * self.shares.launches

    def _evidence(self) -> list[str]:
        """What the figures rest on."""
        settings, machine = self.settings, self.machine
        ranks = settings.tp * settings.stages
        said = [f"memory: {machine.memory_read(ranks, settings.threads).source.text}"]
        if settings.tp > 1:
            said.append(f"all-reduce: {self._all_reduce_source()}")
        if self.shape.experts:
            count, rows = self.shape.experts.count, settings.rows
            said.append(
                f"a layer's {rows} rows reach {self.shape.distinct_experts(rows):.1f} of {count} experts if they "
                f"choose at random, one row {self.shape.experts.routing.per_token}; rows of one text share some, so "
                "fewer"
            )
        return said

    def _all_reduce_source(self) -> str:
        settings, captured = self.settings, self.settings.captured and self.machine.has_gpus
        if settings.curve:
            return settings.curve.source
        size = settings.rows * self.shape.hidden_size * VALUE_BYTES[settings.dtype]
        found = self.machine.all_reduce_us(size, settings.tp, settings.backend, captured, settings.setting)
        return found.source.text
