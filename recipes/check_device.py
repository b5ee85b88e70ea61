"""Compares the target on a device with the target on the CPU: python recipes/check_device.py MODEL DEVICE"""

from __future__ import annotations

import sys

import torch

from slipstream.engine.state import State
from slipstream.target.load import load

TEXT = (
    "The sky is blue because the molecules of the air scatter short waves of light more than long ones. " * 3
)


def main() -> None:
    logits = []
    for device in ("cpu", sys.argv[2]):
        model = load(sys.argv[1], dtype="bfloat16", weights="bfloat16", device=device, positions=256)
        tokens = model.tokenizer.encode(TEXT)
        state = State.allocate(model.target.kv_layout(), 1, 200, 8, torch.bfloat16, torch.device(device))
        state.put(0, tokens, 0.0, 0, 1.0, 0)
        pieces = []
        for begin, end in ((0, 20), (20, 21), (21, 22), (22, len(tokens))):
            hidden, _ = model.target.forward(state.known_rows(0, begin, end), state.kv)
            pieces.append(model.target.logits(hidden)[0].float().cpu())
        logits.append(torch.cat(pieces))
    same = (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()
    difference = (logits[0] - logits[1]).abs()
    print(
        f"first choices alike: {same:.1%}; logits differ by {difference.mean():.4f}, at most {difference.max():.3f}"
    )
    print(repr(model.tokenizer.decode(logits[1].argmax(-1).tolist()))[:300])
    if same < 0.9:
        sys.exit("the device computes something else")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
