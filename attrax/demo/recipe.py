"""A small causal language model trained from scratch on the demonstration passages.

The model, the tokenizer, and the trainer are the ordinary ones of ``transformers`` and ``tokenizers``;
nothing is downloaded and nothing is patched.
"""

import json
from importlib import resources
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

Example = dict[str, list[int]]

VOCAB_SIZE = 2048
EPOCHS = 12
IGNORE = -100
SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(3)


def _read(name: str) -> list[dict[str, Any]]:
    text = resources.files("attrax.demo").joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def passages() -> list[dict[str, Any]]:
    """Load the training passages.

    Returns:
        Records with `id`, `text`, `topic`, and `fact`; `fact` is None where a passage states no listed fact.
    """
    return _read("passages.jsonl")


def questions() -> list[dict[str, Any]]:
    """Load the held-out questions.

    Returns:
        Records with `id`, `prompt`, `completion`, `fact`, and `source`, the id of the one passage that states
        the fact.
    """
    return _read("questions.jsonl")


def tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the passages.

    Args:
        vocab_size: Size of the vocabulary, special tokens included.

    Returns:
        A tokenizer that puts `<s>` before and `</s>` after a text unless told not to add special tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        (row["text"] for row in passages()),
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL[PAD], bos_token=SPECIAL[BOS], eos_token=SPECIAL[EOS]
    )


def model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Build an untrained Llama of two layers and 0.85 million parameters.

    Args:
        tokenizer: The tokenizer whose vocabulary the model predicts.
        seed: Seed of the initial weights.

    Returns:
        The model.
    """
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=96,
            initializer_range=0.05,
            tie_word_embeddings=False,
            attention_dropout=0.0,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def encode_passages(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]] | None = None
) -> list[Example]:
    """Tokenize passages for training, with the loss on every token.

    Args:
        tokenizer: The tokenizer.
        rows: Passages to encode; all of them if None.

    Returns:
        One record per passage, in order, with `input_ids` and `labels`.
    """
    encoded = (tokenizer(row["text"])["input_ids"] for row in (passages() if rows is None else rows))
    return [{"input_ids": ids, "labels": list(ids)} for ids in encoded]


def encode_questions(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]] | None = None
) -> list[Example]:
    """Tokenize questions, with the loss on the completion only.

    Args:
        tokenizer: The tokenizer.
        rows: Questions to encode; all of them if None.

    Returns:
        One record per question, in order, with `input_ids` and `labels`.
    """
    encoded = []
    for row in questions() if rows is None else rows:
        prompt = tokenizer(row["prompt"])["input_ids"][:-1]
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        encoded.append({"input_ids": prompt + answer, "labels": [IGNORE] * len(prompt) + answer})
    return encoded


def collate(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Pad a list of encoded examples on the right into one batch.

    Args:
        examples: Records with `input_ids` and `labels`.

    Returns:
        A batch with `input_ids`, `attention_mask`, and `labels`, where padding has the label -100.
    """
    width = max(len(example["input_ids"]) for example in examples)

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (width - len(row)) for row in rows])

    return {
        "input_ids": padded([example["input_ids"] for example in examples], PAD),
        "attention_mask": padded([[1] * len(example["input_ids"]) for example in examples], 0),
        "labels": padded([example["labels"] for example in examples], IGNORE),
    }


def trainer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    output_dir: str,
    epochs: int = EPOCHS,
    train_dataset: list[Example] | None = None,
    **arguments: Any,
) -> Trainer:
    """Set up the Hugging Face trainer of the demonstration.

    Args:
        model: The model to train.
        tokenizer: Its tokenizer.
        output_dir: Folder for whatever the trainer writes.
        epochs: Passes over the training set.
        train_dataset: Encoded examples; every passage, in order, if None.
        **arguments: Further `TrainingArguments`, which override those of the recipe.

    Returns:
        An ordinary trainer, not yet started.
    """
    settings: dict[str, Any] = dict(
        output_dir=output_dir,
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=1.0,
        adam_beta2=0.99,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        seed=0,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    dataset: Any = encode_passages(tokenizer) if train_dataset is None else train_dataset
    return Trainer(
        model=model,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=dataset,
        data_collator=collate,
    )


def train(output_dir: str, epochs: int = EPOCHS, seed: int = 0) -> Trainer:
    """Train the demonstration model from start to end.

    Args:
        output_dir: Folder for whatever the trainer writes.
        epochs: Passes over the training set.
        seed: Seed of the initial weights and of the order of the data.

    Returns:
        The trainer, finished; the model is its `model`.
    """
    vocabulary = tokenizer()
    run = trainer(model(vocabulary, seed), vocabulary, output_dir, epochs, seed=seed)
    run.train()
    return run
