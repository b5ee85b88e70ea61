"""Names of kernels and annotations as they are in the wild."""

from __future__ import annotations

import pytest

from slipstream.lab.traces.kernels import classify
from slipstream.lab.traces.marks import Meaning, meaning


@pytest.mark.parametrize(
    ("kernel", "kind", "by"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "all_reduce", "NCCL Ring LL"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce", "NCCL Ring LL"),
        ("ncclDevKernel_AllReduce_Sum_f16_TREE_LL128(ncclDevComm*)", "all_reduce", "NCCL Tree LL128"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_SIMPLE(ncclDevComm*)", "all_reduce", "NCCL Ring Simple"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce", "NCCL Ring LL"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", "all_gather", "NCCL Ring LL"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", "reduce_scatter", "NCCL Ring LL"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", "broadcast", "NCCL Ring LL"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv", "NCCL Ring Simple"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv", "NCCL"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "collective", "NCCL"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs4K)", "all_reduce", "NCCL"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce", "vLLM custom"),
        ("void sglang::cross_device_reduce_2stage<__nv_bfloat16, 4>(x)", "all_reduce", "SGLang custom"),
        ("void cross_device_reduce_2stage<half, 4>(RankData*)", "all_reduce", "custom"),
        (
            "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16, 8u, true>("
            "(anonymous namespace)::AllReducePushData, device::distributed::PushController)",
            "all_reduce",
            "SGLang custom",
        ),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<"
            "(flashinfer::trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 8, true>(x)",
            "all_reduce",
            "FlashInfer",
        ),
        (
            "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<4, float>(x)",
            "all_reduce",
            "FlashInfer MNNVL",
        ),
        ("void flashinfer::pcie_ipc::allreduce_staged_kernel<8>(x)", "all_reduce", "FlashInfer PCIe IPC"),
        ("void mscclpp::collective::allreducePacket<mscclpp::SUM, __bfloat16>(x)", "all_reduce", "MSCCL++"),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8>(x)", "all_reduce", "FlashInfer"),
        ("void quickreduce::allreduce_prototype_twoshot<x>(y)", "all_reduce", "quick reduce"),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>(x)", "all_reduce", "symmetric memory"),
        ("void deep_ep::internode_ll::dispatch<true, 3, 7168>(x)", "all_to_all", "DeepEP"),
    ],
)  # fmt: skip
def test_collectives(kernel: str, kind: str, by: str) -> None:
    found = classify(kernel)
    assert (found.name, found.by, found.is_collective) == (kind, by, True)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(x)", "gemm"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_32x3_tn_align1>(x)", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x32x256_MI16x16x1_SN", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<x>>>", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>>>>", "attention"),
        ("fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64VarSeqQ128Kv128", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<x>(y)", "attention"),
        ("void flashinfer::mla::BatchMLAPagedAttentionKernel<x>(y)", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)", "attention"),
        ("void (anonymous namespace)::store_kvcache<2048l, 4, true, long>(x)", "attention"),
        ("void (anonymous namespace)::fused_rope_kernel<true, 128l, true, __nv_bfloat16>(x)", "attention"),
        ("paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16>(x)", "attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(x)", "norm"),
        ("triton_red_fused_fused_add_rms_norm_2", "norm"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8ELb0ELb0ELb1ELi1EEEvPT0_", "norm"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>(x)", "norm"),
        ("fused_moe_kernel", "moe"),
        ("void vllm::moe::topkGatingSoftmax<8, 256, 4, 16>(float const*)", "moe"),
        ("void moe_align_block_size_kernel<int>(int*)", "moe"),
        ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, silu>(x)", "activation"),
        ("triton_poi_fused_mul_silu_slice_1", "activation"),
        ("_gumbel_sample_kernel", "sampling"),
        ("rejection_greedy_sample_kernel", "sampling"),
        ("void VerifyTreeGreedy<int, long>(int*, int*)", "sampling"),
        ("build_tree_efficient(long*, long*)", "sampling"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::ArgMaxOps<float>>>", "sampling"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024>(x)", "sampling"),
        ("Memcpy DtoH (Device -> Pageable)", "copy"),
        ("Memset (Device)", "copy"),
        ("memcpy32_post", "copy"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(x)>", "copy"),
        ("triton_poi_fused_3", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<int>>", "other"),
        ("", "other"),
    ],
)  # fmt: skip
def test_the_rest(kernel: str, kind: str) -> None:
    assert classify(kernel).name == kind


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("step[TARGET_VERIFY bs=2]", Meaning("verify", None, 2)),
        ("step[DECODE bs=32]", Meaning("decode", 32, 32)),
        ("step[EXTEND bs=1 toks=1024]", Meaning("prefill", 1024, 1)),
        ("step[DRAFT_EXTEND_V2 bs=1]", Meaning("extend", None, 1)),
        ("step[IDLE bs=0]", None),
        ("execute_context_0(0)_generation_1(8)", Meaning("verify", 8, 1)),
        ("execute_context_0(0)_generation_4(4)", Meaning("decode", 4, 4)),
        ("execute_context_1(1024)_generation_2(16)", Meaning("prefill", 1040, 3)),
        ("execute_context_0(0)_generation_0(0)", None),
        ("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)", Meaning("decode", 32, 32)),
        ("draft", Meaning("draft")),
        ("draft_extend", Meaning("extend")),
        ("ProfilerStep#12", Meaning("step")),
        ("nccl:all_reduce", None),
        ("redraft the plan", None),
    ],
)  # fmt: skip
def test_annotations(annotation: str, expected: Meaning | None) -> None:
    assert meaning(annotation) == expected
