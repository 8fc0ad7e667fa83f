"""Every setting, typed, with a default that works and a sentence.

Sources, strongest first: keyword arguments, environment (``AGENTKV_…``), the TOML file named by ``AGENTKV_CONFIG``
(default ``<home>/agentkv.toml`` where it exists), defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

__all__ = ["Amount", "Bytes", "Layered", "Settings", "default_home", "nearest"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def default_home() -> Path:
    """``AGENTKV_HOME``, else ``~/.local/share/agentkv``."""
    return Path(os.environ.get("AGENTKV_HOME") or "~/.local/share/agentkv").expanduser()


def _parse_amount(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    text = value.strip().lower().replace("_", "")
    if text.endswith("%"):
        share = float(text[:-1])
        if not 0 < share <= 100:
            raise ValueError(f"a share must lie in (0 %, 100 %], got {value!r}")
        return f"{share:g}%"
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmgt]?i?b?)", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a number of bytes; write e.g. 500MB, 4GiB, 80% or a plain number")
    return int(float(match[1]) * _UNITS[match[2]])


class _Toml(TomlConfigSettingsSource):
    """The file without its table ``[server]``, or that table alone, where ``table`` of the class says so."""

    def __init__(self, settings_cls: type[BaseSettings], toml_file: Path) -> None:
        self._table: str | None = getattr(settings_cls, "table", None)  # it is read in the base's constructor
        super().__init__(settings_cls, toml_file=toml_file)

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        data = super()._read_file(file_path)
        if self._table is None:
            return {name: value for name, value in data.items() if name != "server"}
        found = data.get(self._table, {})
        if not isinstance(found, dict):
            raise ValueError(f"{file_path}: [{self._table}] is a table of settings, not {found!r}")
        return found


Bytes = Annotated[int, BeforeValidator(_parse_amount), Field(ge=0)]
Amount = Annotated[Annotated[int, Field(ge=0)] | str, BeforeValidator(_parse_amount)]
"""Bytes (``4GiB``, ``4294967296``) or a share of what the machine has (``80%``)."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What may be meant by a ``name`` that is none of the ``known``."""
    return next(iter(get_close_matches(name, list(known), 1, 0.8)), None)


class Layered(BaseSettings):
    """Settings from keyword arguments, then environment, then the TOML file. ``folder``: where that is looked for, if
    none of the fields is the home folder."""

    folder: ClassVar[Path | None] = None
    others: ClassVar[tuple[str, ...]] = ()
    """Variables that begin as these settings' do and are none of them; with a trailing ``_``, all that begin so."""

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
        """Variables that look like settings and are none, each with the name that may be meant."""
        prefix = cls.model_config["env_prefix"]
        known = [prefix + name.upper() for name in cls.model_fields]
        return {
            name: nearest(name.upper(), known)
            for name in environ
            if name.upper().startswith(prefix)
            and name.upper() not in known
            and not any(name == other or (other.endswith("_") and name.startswith(other)) for other in cls.others)
        }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """In that order."""
        named = os.environ.get("AGENTKV_CONFIG")
        home = Path(cls.folder or init_settings().get("home") or default_home())
        toml = Path(named) if named else home.expanduser() / "agentkv.toml"
        if named and not toml.is_file():
            raise ValueError(f"AGENTKV_CONFIG names {named}, which is not a file")
        return init_settings, env_settings, _Toml(settings_cls, toml_file=toml)


class Settings(Layered):
    """Configuration of one runtime. Every field is also ``AGENTKV_<NAME>`` and a TOML key."""

    model_config = SettingsConfigDict(env_prefix="AGENTKV_", extra="forbid", frozen=True, validate_default=True)
    others: ClassVar[tuple[str, ...]] = (
        "AGENTKV_SERVER_", "AGENTKV_TEST_", "AGENTKV_CONFIG", "AGENTKV_API_KEY",
        "AGENTKV_AGAINST_KEY", "AGENTKV_FAULT", "AGENTKV_TRACES",
    )  # fmt: skip

    home: Path = Field(default_factory=default_home, description="Folder of models, database and stored KV.")
    model: str = Field("smollm2-135m", description="Catalogue name, local folder, or Hugging Face id.")
    device: str = Field("auto", description="`cpu`, `cuda`, `cuda:N`, or `auto`: CUDA where there is one.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Dtype of weights and KV; `auto` is that of the checkpoint."
    )
    layout: str = Field(
        "auto",
        description="How live KV is stored: `dynamic` (and `auto`), `static`, `paged`, `offloaded`, `offloaded:paged`; "
        "`quantized:int8` and `quantized:int4` (each also with `:static` or `:paged`) hold all but the first 16 and "
        "the last 128 or more tokens in 8 or 4 bits.",
    )
    default_policy: str = Field(
        "full", description="Retention policy of sessions that name none, e.g. `sink:4096`, `adaptive`."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the model; default: one a core.")
    database: str | None = Field(None, description="SQLAlchemy URL; default: SQLite in the home folder.")
    offline: bool = Field(False, description="Never touch the network; models must be local already.")

    idle_codec: str = Field(
        "auto",
        description="Codec of stored KV: `exact` and `raw` restore bit for bit, `int8`, `int4` and `compact` are "
        "smaller; `auto` is the strongest that calibration found to be within `max_kl`.",
    )
    max_kl: float = Field(
        0.005, ge=0, description="What `auto` may cost: mean KL divergence of next-token distributions, in nats."
    )
    restore: Literal["measured", "always"] = Field(
        "measured",
        description="`measured`: KV under a lossy codec is computed again, not restored, where that was measured to be "
        "clearly faster (full attention, policy `full`); `always`: whatever is stored is restored.",
    )
    idle_seconds: float = Field(60.0, ge=0, description="Idle time after which KV moves from device to host memory.")
    disk_seconds: float = Field(600.0, ge=0, description="Idle time after which encoded KV leaves host memory too.")
    device_budget: Amount = Field("80%", description="Bytes, or share of the device's memory, for live KV.")
    host_budget: Amount = Field("20%", description="Bytes, or share of host memory, for encoded KV.")
    disk_budget: Amount = Field("80%", description="Bytes, or share of the file system, for stored KV files.")
    residency: str = Field(
        "cost", description="Which idle session leaves the device first: `cost`, `lru`, `lfu`, `ttl:SECONDS`."
    )
    admission_seconds: float = Field(30.0, ge=0, description="Longest wait of a turn for device memory.")
    admission_queue: int = Field(256, ge=0, description="Most turns that wait for it; another one is refused at once.")
    pin_budget: Amount = Field("50%", description="Bytes, or share of device_budget, that pinned sessions may hold.")
    adaptive_budget: Amount = Field(
        "25%",
        description="Bytes, or share of device_budget, that the tokens of a session under policy `adaptive` may take.",
    )
    disk_margin: Amount = Field("1GiB", description="Free space on the file system that is never used.")

    blobs_url: str | None = Field(
        None,
        description="Where stored KV lies: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///folder`, `memory:`, "
        "or a scheme that a package registers under `agentkv.blobs`; default: files in the home folder.",
    )
    encryption_key: SecretStr | None = Field(
        None, description="Encrypts stored KV (AES-256-GCM): 32 bytes, as 64 hex digits or base64."
    )
    encryption_key_file: Path | None = Field(None, description="File that holds the key, readable by its owner alone.")

    prefill_tokens: int = Field(
        0, ge=0, description="Tokens of one prefill piece; 0 chooses by device (512 on CPU, 2048 on CUDA)."
    )
    joint_rows: int = Field(
        0,
        ge=0,
        description="Most rows of a model step that sessions share; 0: by device (32 on CPU, two pieces on CUDA).",
    )
    max_tokens: int = Field(512, ge=1, description="Generation limit of a turn that names none.")
    prepare_schemas: bool = Field(
        False,
        description="Make the tokenizer's tables for `schema=` when the runtime opens. At their first use they hold "
        "the process up for a moment: 0.4 s for 50,000 tokens, several seconds for 250,000.",
    )
    tool_format: str = Field(
        "auto",
        description="How the model writes tool calls: `hermes`, `qwen-coder`, `llama3`, `mistral`, `transformers` (the "
        "tokenizer's response_template), `text` (they stay text); `auto` finds out from the chat template.",
    )
    busy_wait_seconds: float = Field(30.0, ge=0, description="Longest wait of a turn sent with `wait=True`.")
    log_format: Literal["text", "json"] = Field(
        "text", description="How the command line logs to standard error: a line of text or of JSON an event."
    )
    hub_timeout_seconds: float = Field(5.0, gt=0, description="Network time-out for the first byte of a download.")

    @field_validator("home", mode="after")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @property
    def models_dir(self) -> Path:
        """Where pulled models live."""
        return self.home / "models"

    @property
    def blobs_dir(self) -> Path:
        """Where chunk files live."""
        return self.home / "blobs"

    @property
    def database_url(self) -> str:
        """The SQLAlchemy URL in force, with an async driver."""
        return self.database or f"sqlite+aiosqlite:///{self.home / 'agentkv.db'}"
