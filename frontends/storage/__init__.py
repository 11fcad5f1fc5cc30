"""Gradient stores: directories of HDF5 shards that processes write, and that are read as one source.

Writing goes from `sink` by `recording`, `newshard` and `slabwriter`, reading from `store` by `gather`, `windows`,
`shards` and `slabreader`.  What a shard is, `attrax.core.schema` says; which shards and rows count, `merge`.
"""
