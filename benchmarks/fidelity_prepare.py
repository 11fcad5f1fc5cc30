"""A small language model pre-trained on real text, and data to fine-tune it on: the inputs of the fidelity study.

    python benchmarks/fidelity_prepare.py work/fidelity

writes work/fidelity/model (a Llama of 2.6 million parameters and a byte-pair vocabulary of 4,096, pre-trained for a few
minutes on Wikipedia articles from the test data of the package `gensim`), train.jsonl (512 sequences of 128 tokens from
other articles) and query.jsonl (64 further sequences of the same articles).  Article text: CC BY-SA.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from smollm2 import PACKAGES, articles, wheel

LENGTH, TRAIN, QUERY, VOCABULARY = 128, 512, 64, 4096


def tokenizer_of(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer trained on the texts."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    raw = ByteLevelBPETokenizer()
    raw.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=["<pad>", "<end>"], show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw._tokenizer, pad_token="<pad>", eos_token="<end>")


def model_of(vocabulary: int) -> Any:
    """A random Llama of 2.6 million parameters, tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=512,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        attn_implementation="eager",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config)


def chunks(tokenizer: Any, text: str) -> list[list[int]]:
    """Consecutive pieces of exactly `LENGTH` tokens."""
    ids = tokenizer(text)["input_ids"]
    return [ids[k : k + LENGTH] for k in range(0, len(ids) - LENGTH + 1, LENGTH)]


def pretrain(model: Any, pieces: list[list[int]], steps: int, batch: int = 16) -> None:
    """Plain AdamW with linear warm-up and decay on random pieces."""
    from tqdm import tqdm

    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / (0.05 * steps), (steps - k) / steps)
    )
    model.train()
    for _ in (bar := tqdm(range(steps), desc="pre-training")):
        x = torch.tensor(draw.sample(pieces, batch))
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss.detach()):.2f}")
    model.eval()


def write(path: Path, tokenizer: Any, named: list[tuple[str, list[int]]]) -> None:
    """One JSON object a line: id, text and token ids."""
    rows = [{"id": name, "text": tokenizer.decode(ids), "input_ids": ids} for name, ids in named]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")


def main() -> None:
    """Build model and data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="steps of pre-training")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = articles(wheel(PACKAGES["articles"], Path(folder)))
    random.Random(0).shuffle(pages)
    half = len(pages) // 2
    tokenizer = tokenizer_of([text for _, text in pages[:half]])
    model = model_of(len(tokenizer))
    pretrain(model, [piece for _, text in pages[:half] for piece in chunks(tokenizer, text)], options.steps)
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    rest = [
        (f"{title}#{k}", piece)
        for title, text in pages[half:]
        for k, piece in enumerate(chunks(tokenizer, text))
    ]
    random.Random(1).shuffle(rest)
    write(options.out / "train.jsonl", tokenizer, rest[:TRAIN])
    write(options.out / "query.jsonl", tokenizer, rest[TRAIN : TRAIN + QUERY])
    parameters = sum(p.numel() for p in model.parameters())
    print(f"wrote {options.out}: model ({parameters:,} parameters), train.jsonl, query.jsonl")


if __name__ == "__main__":
    main()
