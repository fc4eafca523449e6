"""Text files to Megatron's indexed dataset: tokenised once, then read like any other `--data-path`."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

BYTE_VOCABULARY = 257  # the 256 bytes, and one id that ends a document
LONGEST_DOCUMENT = 64 * 1024  # characters
DOCUMENTS = 200  # at least about so many: Megatron splits train, validation and test by document
SHORTEST_TEXT = 10 * DOCUMENTS  # characters


def encode_bytes(text: str) -> list[int]:
    """Byte-level tokens: every UTF-8 byte is its own id (0..255)."""
    return list(text.encode("utf-8"))


def build_text_dataset(
    files: list[str], folder: str, encode: Callable[[str], list[int]], end_of_document: int, tokenizer: str
) -> str:
    """Tokenise `files` (UTF-8) into `folder`, unless that was done before; returns the data path prefix.

    The prefix names the content and `tokenizer` (any text that identifies it), so a changed file or tokenizer
    gives another dataset. Files appear whole or not at all: several nodes may write to one shared folder.

    ValueError if a file does not exist or the files hold too little text to be split.
    """
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        raise ValueError(f"text files not found: {', '.join(missing)}; expected paths of readable UTF-8 text")
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    length = sum(map(len, texts))
    if length < SHORTEST_TEXT:
        raise ValueError(
            f"{', '.join(files)}: {length} characters of text, expected at least {SHORTEST_TEXT} to split into "
            "training, validation and test documents"
        )
    digest = hashlib.sha256("\0".join([tokenizer, *texts]).encode()).hexdigest()[:16]
    prefix = Path(folder) / f"text-{digest}"
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        size = min(LONGEST_DOCUMENT, length // DOCUMENTS)
        documents = (document for text in texts for document in _documents(text, size))
        _write(prefix, documents, encode, end_of_document)
    return str(prefix)


def _documents(text: str, size: int) -> Iterator[str]:
    """Pieces of about `size` characters, cut behind a line's end where there is one in their second half."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start + size // 2, start + size) + 1 or start + size
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
