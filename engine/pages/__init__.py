"""Page stores: LMDB and one in memory, what merges changes into pages, and compacting."""
