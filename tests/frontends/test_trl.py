"""Unmodified trainers of TRL inside a capture.

They compute log-probabilities in float32 whatever the model's dtype.  Models in float32 are held to float64 autograd of
one example at a time as `assert_rounded` says; where TRL's kernels are told that float64 is float32, to 1e-10.
"""

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob

from attrax.core import Block
from attrax.frontends import capture, documents, open_store, store, trainer_options
from attrax.frontends.loop.trainers import Samples

from .llms import float64
from .loops import known
from .trainers import Check, label_losses, llama, texts, tokenizer, trained_alike

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
slow = pytest.mark.slow
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "max_steps": 20,
}


class _Double:
    """PyTorch to a module that asks for float32 and shall get float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def exact(patch: pytest.MonkeyPatch) -> None:
    """TRL and the models compute in float64 what they compute in float32."""
    float64(patch)
    patch.setattr(chunked_logprob, "torch", _Double())


def doubled() -> Any:
    return llama().double()


@pytest.fixture(params=["float32", "float64"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Makes the model; in float64 everything is computed in it."""
    if request.param == "float64":
        exact(monkeypatch)
    return llama if request.param == "float32" else doubled


def completions() -> Dataset:
    return Dataset.from_dict({"prompt": [x[:8] for x in texts()], "completion": [x[8:] for x in texts()]})


def sft(model: Any, path: Any, **options: Any) -> Any:
    arguments = SFTConfig(str(path), **{**COMMON, "max_length": 64, "bf16": False, **options})
    return SFTTrainer(model=model, args=arguments, train_dataset=completions(), processing_class=tokenizer())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"gradient_accumulation_steps": 2, "max_steps": 8}, id="accumulating", marks=slow),
        pytest.param({"gradient_checkpointing": False, "max_steps": 4}, id="no checkpointing", marks=slow),
        pytest.param(
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "max_steps": 4},
            id="reentrant",
            marks=slow,
        ),
    ],
)
def test_sft(build, options, tmp_path):
    """The head is fused with the loss, and activations are checkpointed by default."""

    def train(model: Any) -> Any:
        trainer = sft(model, tmp_path, **options)
        return trainer.train, trainer_options(trainer)

    check, running = trained_alike(build, train, lambda model: Check(build(), label_losses))
    assert running.coverage.share == 1
    assert_token_means(check.blocks)


def assert_token_means(blocks: list[Block]) -> None:
    """Each token of a step weighs as one over all of them."""
    for step in {b.examples.step for b in blocks}:
        found = [known(b) for b in blocks if b.examples.step == step]
        total = sum(int(n.sum()) for _, n in found)
        assert all(c.tolist() == pytest.approx([1 / total] * len(c)) for c, _ in found)


def test_sft_in_bfloat16(tmp_path):
    """TRL's own default, also on a CPU: errors against float64 are at most twice those of bfloat16 autograd itself."""

    def train(model: Any) -> Any:
        trainer = sft(model, tmp_path, bf16=True, max_steps=5)
        return trainer.train, trainer_options(trainer)

    def loss(model: Any, row: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.float32):
            return label_losses(model, row)

    check, _ = trained_alike(llama, train, lambda model: Check(llama(), loss))
    assert_token_means(check.blocks)


def one_document(inputs: Any, i: int) -> dict[str, Any]:
    """Document i of a row without padding, and no label on its first token."""
    here = documents(inputs, 1)[0] == i
    return {k: inputs[k][:, here] for k in ("input_ids", "labels")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"padding_free": True, "max_length": None},
        pytest.param({"packing": True, "max_length": 80}, marks=slow),
    ],
    ids=["padding-free", "packing"],
)
def test_sft_without_padding(build, options, tmp_path):
    """Rows hold several documents, each of which is an example."""

    def train(model: Any) -> Any:
        trainer = sft(model, tmp_path, max_steps=4, **options)
        return trainer.train, trainer_options(trainer)

    check, _ = trained_alike(build, train, lambda model: Check(build(), label_losses, one_document))
    assert any(len(b.examples) > 2 for b in check.blocks)
    assert_token_means(check.blocks)


@slow
def test_sft_of_adapters(tmp_path):
    def train(model: Any) -> Any:
        trainer = sft(model, tmp_path, max_steps=4)
        return trainer.train, trainer_options(trainer)

    check, running = trained_alike(lora, train, lambda model: Check(lora(), label_losses))
    assert running.coverage.share == 1
    assert_token_means(check.blocks)


def lora() -> Any:
    """A Llama whose adapters are not zero, as after some training."""
    model: Any = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


def pairs() -> Dataset:
    rows = {"prompt": [x[:8] for x in texts()], "chosen": [x[8:20] for x in texts()]}
    return Dataset.from_dict({**rows, "rejected": [x[8:26][::-1] for x in texts()]})


def dpo(model: Any, path: Any, **options: Any) -> Any:
    arguments = DPOConfig(str(path), max_length=64, **{**COMMON, "bf16": False, **options})
    reference = copy.deepcopy(model)
    return DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=pairs(), processing_class=tokenizer()
    )


def one_pair(inputs: Any, i: int) -> dict[str, Any]:
    half = len(inputs["input_ids"]) // 2
    return {k: v[[i, i + half]] for k, v in inputs.items() if isinstance(v, Tensor) and v.ndim == 2}


def preference(start: Any) -> Callable[[Any, Any], Tensor]:
    """DPO's loss of a pair, against the model that training begins with."""

    def loss(model: Any, rows: Any) -> Tensor:
        each = [{k: v[i : i + 1] for k, v in rows.items()} for i in (0, 1)]
        likely = [-label_losses(m, x) for m in (model, start) for x in each]
        return -F.logsigmoid(0.1 * (likely[0] - likely[1] - likely[2] + likely[3]))

    return loss


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=slow, id="1"), pytest.param({"gradient_accumulation_steps": 2}, id="2")],
)
def test_dpo(build, options, tmp_path):
    """An example is a pair; the reference model runs within the step. Six batches of four pairs an epoch."""

    def train(model: Any) -> Any:
        trainer = dpo(model, tmp_path, **options)
        return trainer.train, trainer_options(trainer)

    check, running = trained_alike(build, train, lambda model: Check(build(), preference(build()), one_pair))
    assert running.coverage.share == 1
    for block in check.blocks:
        c, n = known(block)
        of_step = [b for b in check.blocks if b.examples.step == block.examples.step]
        assert (
            len(c) == 4
            and c.tolist() == pytest.approx([1 / (4 * len(of_step))] * 4)
            and n.tolist() == [1] * 4
        )
    assert len({i for b in check.blocks for i in b.examples.ids}) == 24


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c in "aeiou" for c in x) / 8 for x in completions]


def grpo(model: Any, path: Any, **options: Any) -> Any:
    sizes = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0, "bf16": False, "max_steps": 6}
    arguments = GRPOConfig(str(path), use_vllm=False, **{**COMMON, **sizes, **options})
    prompts = Dataset.from_dict({"prompt": [x[:8] for x in texts()]})
    return GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=tokenizer()
    )


def advantage_times(made: list[Samples]) -> Callable[[Any, Any], Tensor]:
    """GRPO's loss of a sample that the model itself has drawn."""

    def loss(model: Any, row: Any) -> Tensor:
        real = [str(i) for i in row["input_ids"][row["attention_mask"].bool()].tolist()]
        seen = list(made[-1].waiting.values())[::-1]
        worth = next(
            s["advantage"] for s in seen if [*s["prompt_ids"].split(), *s["completion_ids"].split()] == real
        )
        return worth * label_losses(model, row)

    return loss


@pytest.mark.parametrize(
    "kind", ["dapo", *(pytest.param(k, marks=slow) for k in ("grpo", "bnpo", "dr_grpo"))]
)
def test_grpo(build, kind, tmp_path):
    """Samples are generated within the step; columns of the store say what each was worth."""
    made: list[Samples] = []

    def train(model: Any) -> Any:
        steps = {"max_steps": 20} if kind == "dapo" else {"max_steps": 4, "gradient_accumulation_steps": 2}
        trainer = grpo(model, tmp_path, loss_type=kind, **steps)
        made.append(Samples(trainer))
        return trainer.train, {**trainer_options(trainer), "after_backward": made[-1:]}

    kept: list[Block] = []
    with store(tmp_path / "kept", columns=lambda examples: made[-1].columns(examples)) as sink:
        check, running = trained_alike(
            build, train, lambda model: Check(build(), advantage_times(made)), sinks=[kept.append, sink]
        )
    assert running.coverage.share == 1
    found = open_store(tmp_path / "kept")
    assert list(found.ids) == [i for b in kept for i in b.examples.ids] and not made[-1].waiting
    table = {name: found.column(name) for name in found.columns}
    assert len({round(float(a), 3) for a in table["advantage"]}) > 3
    texts = [[int(i) for i in ids.split()] for ids in table["completion_ids"]]
    worth = [reward([tokenizer().decode(ids, skip_special_tokens=True)])[0] for ids in texts]
    assert table["reward:reward"].tolist() == pytest.approx(worth)  # type: ignore[union-attr]
    assert [len(ids) for ids in texts] == [n for b in kept for n in known(b)[1].tolist()]
    assert check.checked


def test_generation_within_a_loop_is_not_run_again(rng):
    """Samples are those drawn without a capture; a prompt as long as the batch leaves a doubt where examples lie."""
    model, blocks = llama().train(), []
    ids = torch.randint(3, 31, (4, 4), generator=rng)

    def sample() -> Tensor:
        torch.manual_seed(2)
        return model.generate(ids, max_new_tokens=6, do_sample=True, attention_mask=torch.ones_like(ids))

    right = sample()
    with capture(model, sinks=[blocks.append]):
        assert torch.equal(sample(), right)
        model(input_ids=right, labels=right).loss.backward()
        assert torch.equal(sample(), right)
    assert len(blocks) == 1
