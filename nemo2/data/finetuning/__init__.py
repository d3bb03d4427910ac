# SPDX-License-Identifier: Apache-2.0
"""Data for fine-tuning: records → samples (token ids, and which of them are trained on) → rows → a step's batches.

sources.py    records and where each stands           jsonl, folders, `datasets` objects
template.py   a record of fields → a sample           input/output through a prompt template
chat.py       a record of messages → a sample         the tokenizer's chat template, the assistant's tokens found
encode.py     all records of a split → samples        what is cut or left out is counted, by line
store.py      samples on disk, hashed                 made by rank 0, mapped by all
packing.py    several samples in one row              best-fit decreasing, aligned for context parallelism
rows.py       samples or packs → tensors, batches     labels, loss mask, positions, `cu_seqlens`
stream.py     the same from a source without an end
tokens.py     records that are token ids already, and records of several kinds
open.py       whatever holds records                  folders of parquet, arrow or JSON lines; objects; the hub
base.py       what all data modules here share        samples made once, kept, packed, cut into batches
module.py     `FineTuningDataModule` and `ChatDataModule`; `hf_dataset.py`, `published.py` (Squad, Dolly, Alpaca) beside it
"""
