"""The recipe of the EAGLE-3 drafter for SmolLM2-135M-Instruct: the model makes the conversations, then the head learns.

    python recipes/smollm2_eagle3.py data  --model smollm2.gguf --out data/ --minutes 8
    python recipes/smollm2_eagle3.py train --model smollm2.gguf --data data/ --out head/ --minutes 8

Both end by themselves within their minutes and keep what they have. On one H200; `--device cpu` with small numbers
shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slipstream.draft.eagle3.checkpoint import save
from slipstream.draft.eagle3.shape import Eagle3Shape, default_taps
from slipstream.target.load import load
from slipstream.target.shape import Rope
from slipstream.train.conversations import Template, make_conversations
from slipstream.train.eagle3_model import Eagle3Module
from slipstream.train.eagle3_trainer import Progress, Recipe, States, losses, train
from slipstream.train.samples import Samples, draft_vocabulary

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HELD_OUT = 1024


def data(args: argparse.Namespace) -> None:
    start, device = time.perf_counter(), args.device
    model = load(args.model, dtype="bfloat16", weights="bfloat16", device=device, positions=2048)
    encode = model.tokenizer.encode
    template = Template(
        encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"),
        encode("\n<|im_start|>assistant\n"),
        encode("<|im_end|>")[0],
    )
    args.out.mkdir(parents=True, exist_ok=True)
    tokens, begin, end, longest_s = [], [], [], 0.0
    for batch in range(10_000):
        began = time.perf_counter()
        if batch and began - start + 1.1 * longest_s > args.minutes * 60:
            break
        temperature = torch.where(torch.rand(args.batch) < 0.6, 0.0, 0.8)
        made = make_conversations(
            model.target,
            template,
            args.batch,
            user_tokens=args.user_tokens,
            answer_tokens=args.answer_tokens,
            user_temperature=0.9,
            answer_temperature=temperature,
            seed=args.seed + batch,
            device=device,
        )
        tokens.append(made.tokens.to(torch.int32).cpu())
        begin.append(made.begin.cpu())
        end.append(made.end.cpu())
        longest_s = max(longest_s, time.perf_counter() - began)
        total = int((torch.cat(end) - torch.cat(begin)).sum())
        print(f"batch {batch}: {total} answer tokens, {time.perf_counter() - start:.0f} s", flush=True)
        everything = {"tokens": torch.cat(tokens), "begin": torch.cat(begin), "end": torch.cat(end)}
        save_file(everything, args.out / "conversations.safetensors")
    for row in made.tokens[:4].tolist():
        print(repr(model.tokenizer.decode(row))[:400])


def is_lively(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """bool [S]: answers of at least 8 tokens whose 4-grams mostly differ: loops are easy to guess and teach nothing."""
    grams = sum(tokens[:, i : tokens.shape[1] - 3 + i].long() * 50_021**i for i in range(4))
    inside = mask[:, 3:]
    grams = torch.where(
        inside, grams, -torch.arange(grams.shape[1]) - 1
    )  # what is outside differs from everything
    ordered = grams.sort(dim=1).values
    repeats = (ordered[:, 1:] == ordered[:, :-1]).sum(1)
    return (mask.sum(1) >= 8) & (repeats < 0.6 * inside.sum(1).clamp_min(1))


def train_head(args: argparse.Namespace) -> None:
    start, device = time.perf_counter(), args.device
    torch.manual_seed(args.seed)
    made = load_file(args.data / "conversations.safetensors")
    place = torch.arange(made["tokens"].shape[1])
    mask = (place >= made["begin"][:, None]) & (place < made["end"][:, None])
    kept = is_lively(made["tokens"], mask)
    tokens, mask = made["tokens"][kept].long(), mask[kept]
    print(f"{len(kept)} conversations, {len(tokens)} kept, {int(mask.sum())} answer tokens", flush=True)
    model = load(args.model, dtype="bfloat16", weights="bfloat16", device=device, positions=2048)
    shape = model.shape
    d2t, coverage = draft_vocabulary(Samples.of_rows(tokens, mask), shape.vocab_size, args.vocabulary)
    print(f"{args.vocabulary} draft tokens cover {coverage:.2%} of the answers", flush=True)
    head_shape = Eagle3Shape(
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=args.vocabulary,
        rms_norm_eps=shape.rms_norm_eps,
        rope=Rope(10000.0),
        taps=default_taps(shape.layers),
    )
    table = model.target.embed(torch.arange(shape.vocab_size, device=device))
    head = Eagle3Module(head_shape, table, d2t, tokens.shape[1] + 16)
    with torch.no_grad():  # its own output layer begins as the target's
        head.weight("lm_head.weight").copy_(table[torch.arange(args.vocabulary) + d2t].float())
    held = min(HELD_OUT, len(tokens) // 4)
    tokens, mask = tokens.to(device), mask.to(device)
    recipe = Recipe(steps=args.steps, batch=args.batch, epochs=args.epochs, lr=args.lr, seed=args.seed)
    log: list[dict[str, object]] = []

    def on_update(now: Progress) -> bool:
        passed = time.perf_counter() - start
        if now.update % 50 == 0 or now.update == 1:
            shown = " ".join(f"{rate:.3f}" for rate in now.accepted)
            print(
                f"{now.update}/{now.updates} {passed:.0f} s loss {now.loss:.3f} accepted {shown}", flush=True
            )
            log.append({"update": now.update, "s": passed, "loss": now.loss, "accepted": now.accepted})
        return passed < args.minutes * 60 - 45

    began = time.perf_counter()
    train(head, model.target, tokens[held:], mask[held:], recipe, on_update)
    trained_s = time.perf_counter() - began
    accepted = evaluate(head, model.target, tokens[:held], mask[:held], recipe)
    facts = {
        "accepted": accepted,
        "tokens_a_cycle_chain": 1 + sum(float(torch.tensor(accepted[:n]).prod()) for n in range(1, 5)),
        "coverage": coverage,
        "conversations": len(tokens),
        "answer_tokens": int(mask.sum()),
        "trained_s": trained_s,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "recipe": vars(recipe) if hasattr(recipe, "__dict__") else str(recipe),
        "log": log,
    }
    print(json.dumps({k: v for k, v in facts.items() if k != "log"}), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.cpu() if name == "d2t" else t.to(torch.bfloat16).cpu() for name, t in head.tensors().items()
    }
    save(args.out, head_shape, tensors)
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def evaluate(head: Eagle3Module, target, tokens, mask, recipe: Recipe) -> list[float]:  # type: ignore[no-untyped-def]
    """Acceptance by step on samples that were not trained on, given that all before it stood."""
    states = States(target, head.shape.taps, recipe.batch, tokens.shape[1], str(tokens.device))
    right = counted = 0
    with torch.no_grad():
        for rows in torch.arange(len(tokens), device=tokens.device).split(recipe.batch):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
                _, hits, tried = losses(head, target, tokens[rows], mask[rows], states, recipe)
            right, counted = right + hits, counted + tried
    return [float(rate) for rate in right / counted.clamp_min(1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["data", "train"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--user-tokens", type=int, default=96)
    parser.add_argument("--answer-tokens", type=int, default=352)
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.batch = args.batch or (2048 if args.what == "data" else 48)
    (data if args.what == "data" else train_head)(args)


if __name__ == "__main__":
    main()
