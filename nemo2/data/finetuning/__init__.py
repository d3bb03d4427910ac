# SPDX-License-Identifier: Apache-2.0
"""Data for fine-tuning: records → samples (token ids with a loss mask) → rows → a step's batches.

sources.py    records and their positions             jsonl, folders, `datasets` objects
template.py   a record of fields → a sample           input/output through a prompt template
chat.py       a record of messages → a sample         the tokenizer's chat template, the assistant's tokens found
encode.py     all records of a split → samples        truncated and dropped records are counted, by line
store.py      samples on disk, hashed                 written by rank 0, memory-mapped by all
packing.py    several samples in one row              best-fit decreasing, aligned for context parallelism
rows.py       samples or packs → tensors, batches     labels, loss mask, positions, `cu_seqlens`
stream.py     the same for a source without an end
tokens.py     records that are already token ids, and records of several kinds
open.py       anything with records                   folders of parquet, arrow or JSON lines; objects; the hub
base.py       common base of these data modules       samples made once, stored, packed, split into batches
module.py     `FineTuningDataModule` and `ChatDataModule`; `hf_dataset.py`, `published.py` (Squad, Dolly, Alpaca) beside
it
"""
