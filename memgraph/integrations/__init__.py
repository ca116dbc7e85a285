"""Callbacks of other libraries: `MemoryBudget` for the Trainer of transformers, `LightningBudget` for Lightning's."""
