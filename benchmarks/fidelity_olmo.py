"""The run of the fidelity study once through OLMo-core's trainer, and whether it gets the scores that HF's gets.

    .venv-olmo-3.0.0/bin/python benchmarks/fidelity_olmo.py work/fidelity train      # in OLMo-core's environment
    python benchmarks/fidelity_olmo.py work/fidelity compare --out benchmarks/results/fidelity_olmo.json

The first command gives the study's model to OLMo-core (the same weights under its names), trains it with OLMo-core's
unmodified trainer inside one capture (its own data loader, shuffling, schedule and micro-batches of 8), and scores the
run with three methods.  The second trains the model with an unmodified Hugging Face Trainer in the order and with the
learning rates that the capture of OLMo-core's run recorded, scores that, and compares parameters and scores.

Adam's first step is +-lr wherever a gradient is far above its epsilon (1e-8); below, its derivative is lr / epsilon.
Where float32 rounding makes half of a gradient it also decides that derivative, so that influence through the first
step is known to some percent only, whatever computes it; it is given apart.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attrax

BATCH, MICRO, RATE, DECAY, CLIP, WARMUP = 32, 8, 4e-5, 0.01, 1.0, 2
QUERIES = 16
LAYER = {
    "self_attn.q_proj": "attention.w_q",
    "self_attn.k_proj": "attention.w_k",
    "self_attn.v_proj": "attention.w_v",
    "self_attn.o_proj": "attention.w_out",
    "input_layernorm": "attention_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "feed_forward_norm",
}


def renamed(name: str) -> str:
    """OLMo-core's name of a parameter of a Hugging Face Llama.

    >>> renamed("model.layers.3.mlp.down_proj.weight")
    'blocks.3.feed_forward.w2.weight'
    """
    whole = {"model.embed_tokens.weight": "embeddings.weight", "model.norm.weight": "lm_head.norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, *module, last = name.split(".")
    return f"blocks.{layer}.{LAYER['.'.join(module)]}.{last}"


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Sequences of a JSON lines file."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf8").splitlines()]


def batch_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of sequences of equal length."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids, "example_ids": tuple(row["id"] for row in rows)}


def olmo_model(folder: Path) -> Any:
    """A module of OLMo-core in the shape of the study's model."""
    from olmo_core.nn.transformer import TransformerConfig

    about = json.loads((folder / "model" / "config.json").read_text())
    config = TransformerConfig.llama_like(
        d_model=about["hidden_size"],
        n_layers=about["num_hidden_layers"],
        n_heads=about["num_attention_heads"],
        vocab_size=about["vocab_size"],
        layer_norm_eps=about["rms_norm_eps"],
        rope_theta=int(about["rope_parameters"]["rope_theta"]),
        hidden_size_multiple_of=about["intermediate_size"],
    )
    config.tie_word_embeddings = about["tie_word_embeddings"]
    return config.build(init_device="cpu")


def loaded(model: Any, folder: Path) -> Any:
    """The module with the study's weights, of which it has to have every one; trainers reset a module they get."""
    from safetensors.torch import load_file

    weights = {renamed(name): x for name, x in load_file(folder / "model" / "model.safetensors").items()}
    own = dict(model.named_parameters())
    if set(own) != set(weights):
        raise ValueError(f"the models differ in {sorted(set(own) ^ set(weights))}.")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(weights[name])
    return model


def olmo_trainer(model: Any, folder: Path, length: int) -> Any:
    """OLMo-core's trainer of one epoch."""
    from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
    from olmo_core.optim import AdamWConfig, LinearWithWarmup, OptimGroupOverride
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    tokens = np.array([row["input_ids"] for row in rows_of(folder, "train")], dtype=np.uint16)
    work = folder / "olmo"
    tokens.tofile(work / "tokens.npy")
    norms = OptimGroupOverride(params=["*norm.weight"], opts={"weight_decay": 0.0})
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=MICRO * length,
        max_sequence_length=length,
        optim=AdamWConfig(
            lr=RATE, weight_decay=DECAY, betas=(0.9, 0.999), fused=False, group_overrides=[norms]
        ),
        max_grad_norm=CLIP,
        scheduler=LinearWithWarmup(warmup=WARMUP, alpha_f=0.0),
        compile_model=False,
    ).build(model)
    named = TokenizerConfig(vocab_size=int(tokens.max()) + 1, eos_token_id=1, pad_token_id=0, bos_token_id=1)
    data = NumpyFSLDatasetConfig(
        paths=[str(work / "tokens.npy")], sequence_length=length, tokenizer=named, work_dir=str(work / "work")
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=BATCH * length, seed=0, num_workers=0).build(data)
    return TrainerConfig(
        save_folder=str(work / "save"),
        work_dir=str(work / "work"),
        save_overwrite=True,
        max_duration=Duration.steps(len(tokens) // BATCH),
        metrics_collect_interval=5,
        no_checkpoints=True,
    ).build(module, loader)


def captured(
    model: Any, folder: Path, run: Path, train: Callable[[], object], **options: Any
) -> dict[int, list[list[str]]]:
    """Train inside a capture that records steps; ids of the micro-batches by step."""
    named = {tuple(row["input_ids"]): row["id"] for row in rows_of(folder, "train")}
    order: dict[int, list[list[str]]] = {}
    with attrax.capture(
        model,
        transform=lambda name, leaf: None,
        sinks=[lambda block: order.setdefault(block.examples.step, []).append(list(block.examples.ids))],
        ids=lambda inputs: [named.get(tuple(ids), "mock") for ids in inputs["input_ids"].tolist()],
        trajectory=attrax.record(run, overwrite=True),
        **options,
    ):
        train()
    return order


def scored(
    start: Any, end: Any, folder: Path, run: Path, order: dict[int, list[list[str]]]
) -> dict[str, attrax.Scores]:
    """Scores of a recorded run by three methods."""
    rows, loss = {row["id"]: row for row in rows_of(folder, "train")}, attrax.causal_lm()
    recorded = attrax.open_trajectory(run)
    batches = {step: [batch_of([rows[i] for i in micro]) for micro in order[step]] for step in recorded.steps}
    queries = [batch_of(rows_of(folder, "query")[:QUERIES])]
    along = attrax.replay(start.eval(), batches, loss, recorded, reduction="token_mean")
    asked = attrax.live(end.eval(), queries, loss, verify=False)
    data = [batch for micro in batches.values() for batch in micro]
    return {
        "GradDot": attrax.graddot(attrax.live(end, data, loss, verify=False), asked),
        "TracIn": attrax.tracin(along, along.queries(queries)).per_example()[0],
        "AdamW-influence": attrax.trajectory_influence(along, asked).per_example()[0],
    }


def train(folder: Path) -> None:
    """OLMo-core's run and its scores."""
    from olmo_core.train import prepare_training_environment, teardown_training_environment

    (folder / "olmo").mkdir(exist_ok=True)
    prepare_training_environment(backend=None, seed=0)
    model, run = olmo_model(folder), folder / "olmo" / "run"
    made = olmo_trainer(model, folder, len(rows_of(folder, "train")[0]["input_ids"]))
    loaded(model, folder)
    order = captured(model, folder, run, made.fit, **attrax.trainer_options(made))
    order = {
        step: [ids for ids in order[step] if "mock" not in ids] for step in attrax.open_trajectory(run).steps
    }
    torch.save(dict(model.state_dict()), folder / "olmo" / "trained.pt")
    (folder / "olmo" / "order.json").write_text(json.dumps(order))
    for name, scores in scored(loaded(olmo_model(folder), folder), model, folder, run, order).items():
        torch.save([scores.values, scores.ids, scores.query_ids], folder / "olmo" / f"{name}.pt")
    teardown_training_environment()


def hf_model(folder: Path) -> Any:
    """The study's model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )


def compare(folder: Path, out: Path | None) -> None:
    """The Hugging Face Trainer's run in the same order, its scores, and how far the two runs are apart."""
    from fidelity import collate
    from transformers import Trainer, TrainingArguments
    from workload import write

    olmo = attrax.open_trajectory(folder / "olmo" / "run")
    order: dict[str, list[list[str]]] = json.loads((folder / "olmo" / "order.json").read_text())
    rows = {row["id"]: row["input_ids"] for row in rows_of(folder, "train")}
    data = [
        {"input_ids": rows[i], "labels": rows[i]} for micro in order.values() for ids in micro for i in ids
    ]
    model = hf_model(folder)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=RATE,
    )
    rates = [next(iter(olmo.step(n).optimizers.values())).lr / RATE for n in olmo.steps] + [0.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: rates[k])
    arguments = TrainingArguments(
        str(folder / "trainer"),
        num_train_epochs=1,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // MICRO,
        max_grad_norm=CLIP,
        train_sampling_strategy="sequential",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        logging_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=collate,
        optimizers=(optimizer, schedule),
    )
    run = folder / "olmo" / "hf"
    found = scored(hf_model(folder), model, folder, run, captured(model, folder, run, trainer.train))
    theirs: dict[str, Tensor] = torch.load(folder / "olmo" / "trained.pt")
    moved = {
        n: p.detach() - q.detach()
        for (n, p), q in zip(hf_model(folder).named_parameters(), model.parameters(), strict=True)
    }
    apart = {n: p.detach() - theirs[renamed(n)] for n, p in model.named_parameters()}
    result: dict[str, Any] = {
        "parameters_apart_over_moved": total(apart) / total(moved),
        "steps": len(olmo.steps),
    }
    first = {i for ids in next(iter(order.values())) for i in ids}
    for name, scores in found.items():
        values, ids, queries = torch.load(folder / "olmo" / f"{name}.pt")
        other = attrax.Scores(values, ids, queries).in_order(scores.ids).query(*scores.query_ids)
        late = torch.tensor([i not in first for i in scores.ids])
        result[name] = {
            "apart_over_largest": apart_by(scores.values, other.values),
            "apart_over_largest_after_first_step": apart_by(scores.values[late], other.values[late]),
            "spearman": float(attrax.agreement(scores, other).mean()),
        }
    print(json.dumps(result, indent=1))
    write(out, **result)


def apart_by(x: Tensor, y: Tensor) -> float:
    """Largest difference over the largest entry."""
    return float((x - y).abs().max() / y.abs().max())


def total(values: dict[str, Tensor]) -> float:
    """Norm of tensors together."""
    return math.sqrt(sum(float(x.double().square().sum()) for x in values.values()))


def main() -> None:
    """Train, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="as for fidelity.py")
    parser.add_argument("what", choices=("train", "compare"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "train":
        train(options.folder)
    else:
        compare(options.folder, options.out)


if __name__ == "__main__":
    main()
