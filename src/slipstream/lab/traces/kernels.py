"""What a kernel does, from its name: the only thing that every profiler records of it.

The names are those of NCCL and RCCL (old and new), vLLM, SGLang, FlashInfer, TensorRT-LLM, MSCCL++, DeepEP, aiter,
cuBLAS, CUTLASS, hipBLASLt, Triton and torch, as their sources and published traces show them. The first rule that
matches wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

CLASSES = ("gemm", "attention", "moe", "norm", "activation", "sampling", "copy", "other")
"""Of what computes, in this order. Attention includes rotary embedding and writing KV; copy includes filling."""


@dataclass(frozen=True)
class KernelClass:
    """The class of a kernel."""

    name: str
    """One of `CLASSES`, one of `cycle_cost.COLLECTIVES`, or `collective` where the name does not say which."""
    by: str = ""
    """Of a collective: what carries it."""

    @property
    def is_collective(self) -> bool:
        return self.name not in CLASSES


_WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
_WORD = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|send_?recv", re.I)
_NCCL = re.compile(r"\bnccl\w*", re.I)
_ALGORITHM = re.compile(r"ring|tree|collnet|nvls|pat", re.I)
_PROTOCOL = re.compile(r"ll128|ll|simple", re.I)
_CUSTOM = (  # what carries a collective that is not NCCL's
    (re.compile(r"mscclpp|msccl\+\+", re.I), "MSCCL++"),
    (re.compile(r"mnnvl", re.I), "FlashInfer MNNVL"),
    (re.compile(r"pcie_?ipc", re.I), "FlashInfer PCIe IPC"),
    (re.compile(r"device::distributed::"), "SGLang custom"),
    (re.compile(r"flashinfer|trtllm|tensorrt_llm|lamport", re.I), "FlashInfer"),
    (re.compile(r"quick_?reduce|quick_?all_?reduce", re.I), "quick reduce"),
    (re.compile(r"multimem|symm_?mem", re.I), "symmetric memory"),
    (re.compile(r"deep_?ep", re.I), "DeepEP"),
    (re.compile(r"aiter", re.I), "aiter"),
    (re.compile(r"vllm", re.I), "vLLM custom"),
    (re.compile(r"sgl", re.I), "SGLang custom"),
)
_COLLECTIVE = re.compile(
    r"cross_device_reduce|(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|alltoallv?)(?![a-z]*_?buffer)"
    r"|deep_?ep.*(?:dispatch|combine)|(?:one|two)_?shot.*reduce",
    re.I,
)
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.I))
    for name, pattern in (
        ("copy", r"^mem(?:cpy|set)|memcpy\d*_post|^copy(?:device|host|buffer)|^fillbuffer|__amd_rocclr"),
        ("norm", r"rms_?norm|layer_?norm|group_?norm|rowwisemoments|addnorm"),
        ("moe", r"moe|expert|grouped_?gemm|m_grouped|topk_?gating|topk_?softmax|router"),
        (
            "sampling",
            r"sample|sampling|argmax|arg_?max|gumbel|rejection|verify_?tree|verifytree|build_?tree|fill_bonus"
            r"|multinomial|top_?k|top_?p|radix_?sort|softmax(?!.*(?:attn|attention|fmha))|penalt|logits_process",
        ),
        (
            "attention",
            r"flash(?!infer::(?:norm|activation|sampling))|fmha|attn|attention|\bmla|_mla|paged|kv_?cache|kvcache"
            r"|rotary|rope|batch_?(?:prefill|decode)|merge_?(?:attn_)?state|_fwd_kernel|fwd_grouped_kernel_stage"
            r"|reshape_and_cache|kv_indices",
        ),
        (
            "gemm",
            r"gemm|nvjet|cublas|cijk_|splitk|gemv|xmma|wmma|matmul|marlin|machete|wvsplitk|linear_kernel"
            r"|\bmm_kernel|_mm_|bmm|tensorop",
        ),
        ("activation", r"silu|gelu|swiglu|act_and_mul|geglu|\brelu"),
        (
            "copy",
            r"direct_copy|catarraybatchedcopy|fillfunctor|copy_kernel|uniform_copy|multi_tensor_apply.*copy"
            r"|tofloat32_copy|identity",
        ),
    )
)


@lru_cache(maxsize=65536)
def classify(kernel: str) -> KernelClass:
    """The class of a kernel (or copy, or fill) by its name."""
    nccl = _NCCL.search(kernel)
    if nccl:
        word = nccl.group()
        return KernelClass(_kind(word[4:]), " ".join(["NCCL", *_nccl_choice(word)]))
    if _COLLECTIVE.search(kernel):
        by = next((name for pattern, name in _CUSTOM if pattern.search(kernel)), "custom")
        return KernelClass(_kind(kernel), by)
    for name, pattern in _RULES:
        if pattern.search(kernel):
            return KernelClass(name)
    return KernelClass("other")


def collective_kind(word: str) -> str:
    """The kind that a profiler's own word (`allreduce`, `_allgather_base`, `nccl:all_reduce`) means."""
    return _kind(word)


def _kind(text: str) -> str:
    if re.search(r"cross_device_reduce|(?:one|two)_?shot.*reduce", text, re.I):
        return "all_reduce"
    if re.search(r"deep_?ep.*(?:dispatch|combine)", text, re.I):
        return "all_to_all"
    found = _WORD.search(text)
    return _WORDS[found.group().lower().replace("_", "")] if found else "collective"


def _nccl_choice(word: str) -> list[str]:
    """Algorithm and protocol, where the kernel's name carries them. `Generic` kernels of new versions carry neither."""
    tail = _WORD.sub("", word.removeprefix("nccl"), count=1)
    algorithm, protocol = _ALGORITHM.search(tail), _PROTOCOL.search(tail)
    names = {"ring": "Ring", "tree": "Tree", "collnet": "CollNet", "nvls": "NVLS", "pat": "PAT"}
    result = [names[algorithm.group().lower()]] if algorithm else []
    if protocol:
        result.append({"ll128": "LL128", "ll": "LL", "simple": "Simple"}[protocol.group().lower()])
    return result
