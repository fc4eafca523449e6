"""Text files to Megatron's indexed dataset: tokenised once, then read like any other `--data-path`."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

BYTE_VOCABULARY = 257  # the 256 bytes, and one id that ends a document
DOCUMENT_BYTES = 64 * 1024  # about how much text becomes one document, cut at an empty line


def encode_bytes(text: str) -> list[int]:
    """Byte-level tokens: every UTF-8 byte is its own id (0..255)."""
    return list(text.encode("utf-8"))


def build_text_dataset(
    files: list[str], folder: str, encode: Callable[[str], list[int]], end_of_document: int, tokenizer: str
) -> str:
    """Tokenise `files` (UTF-8) into `folder`, unless that was done before; returns the data path prefix.

    The prefix names the content and `tokenizer` (any text that identifies it), so a changed file or tokenizer
    gives another dataset. Files appear whole or not at all: several nodes may write to one shared folder.

    ValueError if a file does not exist or the files hold no text.
    """
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        raise ValueError(f"text files not found: {', '.join(missing)}; expected paths of readable UTF-8 text")
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    if not any(text.strip() for text in texts):
        raise ValueError(f"no text in {', '.join(files)}: expected files with something to learn from")
    digest = hashlib.sha256("\0".join([tokenizer, *texts]).encode()).hexdigest()[:16]
    prefix = Path(folder) / f"text-{digest}"
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        _write(prefix, (document for text in texts for document in _documents(text)), encode, end_of_document)
    return str(prefix)


def _documents(text: str) -> Iterator[str]:
    """Cut at the first empty line after each DOCUMENT_BYTES characters."""
    start = 0
    while start < len(text):
        cut = text.find("\n\n", start + DOCUMENT_BYTES)
        end = len(text) if cut < 0 else cut + 2
        yield text[start:end]
        start = end


def _write(prefix: Path, documents: Iterator[str], encode, end_of_document: int) -> None:
    unfinished = f"{prefix}.{os.uname().nodename}.{os.getpid()}"
    builder = IndexedDatasetBuilder(unfinished + ".bin", dtype=np.int32)
    for document in documents:
        tokens = [*encode(document), end_of_document]
        builder.add_document(torch.tensor(tokens, dtype=torch.int32), [len(tokens)])
    builder.finalize(unfinished + ".idx")
    for suffix in (".bin", ".idx"):  # the index last: its presence says that both are there
        os.replace(unfinished + suffix, f"{prefix}{suffix}")
