"""The settings of a scoring run as a value, and as a YAML file that replays it.

The file lies beside every result.  Its settings are those of the command line; under `recorded` it says which versions
ran and what the inputs were (content hashes of data files, fingerprint of the parameters), so that a replay knows
whether it starts from the same things.
"""

import difflib
import hashlib
import platform
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

METHODS: Mapping[str, tuple[str, ...]] = {
    "graddot": ("projection_dim",),
    "gradcos": ("projection_dim",),
    "kfac": ("damping", "fisher", "projection_dim", "query_rank"),
    "ekfac": ("damping", "fisher", "projection_dim", "query_rank"),
    "logra": ("damping", "projection_dim"),
    "self_influence": (),
}
"""Methods by name, each with the settings that only some methods have."""

_PACKAGES = ("attrax", "torch", "transformers", "tokenizers", "numpy")
_PATHS = ("model", "train", "query", "out")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of `attrax score`; None leaves a choice to the model, the data or the method.

    Attributes:
        model: Folder written by `save_pretrained`, or hub name.
        train: Train data.
        query: Query data; self_influence has none.
        out: Result folder.
        method: Attribution method.
        projection_dim: Width of the random projection of each side of a layer.
        query_rank: Rank that the preconditioned queries of a layer are kept at.
        damping: Factor of each layer's mean eigenvalue.
        fisher: Labels that the curvature is measured with.
        target: How an example's loss is made from its tokens' losses.
        include: Only layers whose module path matches this regular expression.
        exclude: No layer whose module path matches this one.
        strict: Whether parameters without layer rule, or left out, are an error.
        form: How to read records whose columns leave a choice.
        train_split: Split of the train data, where it has several.
        query_split: Split of the query data.
        max_length: Most tokens of an example.
        overlong: What to do with longer ones.
        empty: What to do with examples without a token to predict.
        tokens: Most tokens of a batch, padding included.
        on_nonfinite: What to do with examples whose loss is not finite.
        dtype: Type of parameters and gradients; "auto" keeps the stored one.
        device: Device, or "auto".
        seed: Seed of projections and sampled labels.
        top: Passages shown for each question in the report.
        format: Format of the scores file.
        layout: "long" has a row per example and query, "wide" a row per example.
        html: Whether to write the report.
    """

    model: str
    train: str
    out: str
    query: str | None = None
    method: str = "ekfac"
    projection_dim: int | None = None
    query_rank: int | None = None
    damping: float | None = None
    fisher: Literal["empirical", "sampled"] | None = None
    target: Literal["sum", "mean"] = "sum"
    include: str | None = None
    exclude: str | None = None
    strict: bool = False
    form: Literal["text", "completion", "chat"] | None = None
    train_split: str | None = None
    query_split: str | None = None
    max_length: int | None = None
    overlong: Literal["error", "truncate", "skip"] = "error"
    empty: Literal["error", "skip", "keep"] = "error"
    tokens: int = 4096
    on_nonfinite: Literal["raise", "skip"] = "raise"
    dtype: Literal["float32", "float64", "bfloat16", "float16", "auto"] = "float32"
    device: str = "auto"
    seed: int = 0
    top: int = 10
    format: Literal["parquet", "csv", "h5"] = "parquet"
    layout: Literal["long", "wide"] = "long"
    html: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run started from: package versions, and hashes of inputs by name."""

    versions: Mapping[str, str]
    inputs: Mapping[str, str]


def checked(config: Config) -> Config:
    """The settings, if they make sense together.

    Raises:
        ValueError: Naming the setting, what it is, what is expected, and the remedy.
    """
    if config.method not in METHODS:
        raise ValueError(
            f"method: got '{config.method}'; expected one of {', '.join(METHODS)}.{_closest(config.method, METHODS)}"
        )
    only_some = {name for names in METHODS.values() for name in names}
    for name in sorted(only_some - set(METHODS[config.method])):
        if getattr(config, name) is not None:
            having = [method for method, names in METHODS.items() if name in names]
            raise ValueError(
                f"{name}: method '{config.method}' has none. Leave it out, or choose one of {', '.join(having)}."
            )
    for name in ("tokens", "top", "max_length", "projection_dim", "query_rank"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: got {value}; expected a positive number.")
    if config.damping is not None and config.damping < 0:
        raise ValueError(f"damping: got {config.damping}; expected 0 or more.")
    if (config.query is None) != (config.method == "self_influence"):
        remedy = (
            "it scores the train data against themselves: leave query out"
            if config.query
            else "give query data"
        )
        raise ValueError(f"query: got {config.query!r} with method '{config.method}'; {remedy}.")
    return config


def _closest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    found = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean '{found[0]}'?" if found else ""


def write_config(config: Config, recorded: Recorded, path: str | Path) -> None:
    """Write settings and what was recorded as YAML; local paths become absolute."""
    settings = {k: v for k, v in asdict(located(config, Path.cwd())).items() if v is not None}
    page = _yaml().safe_dump(
        {**settings, "recorded": {"versions": dict(recorded.versions), "inputs": dict(recorded.inputs)}},
        sort_keys=False,
        allow_unicode=True,
    )
    Path(path).write_text(
        f"# Replay: attrax run {Path(path).name} --out NEW_FOLDER\n{page}", encoding="utf-8"
    )


def read_config(path: str | Path) -> tuple[Config, Recorded]:
    """Read a YAML file of settings, one that `write_config` wrote or one by hand.

    Args:
        path: The file; relative paths in it are relative to its folder.

    Returns:
        The settings, and what was recorded (empty in a file by hand).

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If pyyaml is not installed.
        ValueError: If it is not such a file, or a setting is unknown, missing or of the wrong type.
    """
    path, yaml = Path(path), _yaml()
    if not path.is_file():
        raise FileNotFoundError(f"config: {path}: there is no such file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path}: not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config: {path}: expected settings as 'name: value' lines.")
    noted = content.pop("recorded", None) or {}
    config = located(configured(content, f"config: {path}: "), path.parent)
    return config, Recorded(noted.get("versions", {}), noted.get("inputs", {}))


def configured(settings: Mapping[str, Any], where: str = "") -> Config:
    """Settings by name as a checked value.

    Args:
        settings: Names and values; what is left out keeps its default.
        where: Put before errors.

    Returns:
        The settings.

    Raises:
        ValueError: If a setting is unknown, missing, of the wrong type, or at odds with another.
    """
    hints = get_type_hints(Config)
    for name, value in settings.items():
        if name not in hints:
            raise ValueError(f"{where}unknown setting '{name}'.{_closest(str(name), hints)}")
        if not _fits(value, hints[name]):
            raise ValueError(f"{where}{name}: got {value!r}; expected {_spelled(hints[name])}.")
    missing = [field.name for field in fields(Config)[:3] if field.name not in settings]
    if missing:
        raise ValueError(f"{where}the settings {', '.join(missing)} are missing.")
    try:
        return checked(Config(**settings))
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


def located(config: Config, folder: Path) -> Config:
    """Settings with absolute paths; a model that is no folder is left as the hub name it may be."""
    found = {name: getattr(config, name) for name in _PATHS if getattr(config, name) is not None}
    local = {name: folder / value for name, value in found.items()}
    return replace(
        config,
        **{n: str(p.resolve()) for n, p in local.items() if n != "model" or p.exists() or p.is_absolute()},
    )


def _yaml() -> Any:
    from attrax.frontends.data.records import needed

    return needed("yaml", "cli", "reading and writing config.yaml")


def _options(hint: Any) -> list[Any]:
    """The types and values that a type hint allows."""
    if get_origin(hint) in (Union, types.UnionType):
        return [option for part in get_args(hint) for option in _options(part)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def _fits(value: Any, hint: Any) -> bool:
    def fits(option: Any) -> bool:
        if not isinstance(option, type):
            return value == option
        number = isinstance(value, int) and not isinstance(value, bool)
        return type(value) is option or (option is float and number)

    return any(fits(option) for option in _options(hint))


def _spelled(hint: Any) -> str:
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return " or ".join(
        names.get(option, repr(option)) for option in _options(hint) if option not in (None, type(None))
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the numbers may depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def content_hash(path: str | Path) -> str:
    """Hash of a file's bytes, or of all files below a folder with their names."""
    path = Path(path)
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path).as_posix()};".encode() if path.is_dir() else b"")
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
    return f"blake2b:{digest.hexdigest()}"


def changes(before: Recorded, now: Recorded) -> tuple[list[str], list[str]]:
    """Names of inputs, and descriptions of packages, that differ from what was recorded."""
    inputs = [name for name, value in before.inputs.items() if now.inputs.get(name) != value]
    packages = [
        f"{name} {value} -> {now.versions.get(name, 'none')}"
        for name, value in before.versions.items()
        if now.versions.get(name) != value
    ]
    return inputs, packages
