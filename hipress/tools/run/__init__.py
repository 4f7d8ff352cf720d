"""A training run of several methods, for `hipress bench` and bench/.

corpus, lstm    the workload: a word-level LSTM on the standard library's source, or a user's model
methods         the synchronization: PyTorch's baselines and HiPress codecs
fsdp2           models of FSDP2, with its own collectives or those of hipress.shard
jobs            the order of a run, and its result
worker          one rank: trains, counts bytes, reports events as JSON lines
netns, place    the places of ranks: network namespaces on throttled links, or loopback
runner          starts the ranks of one method, watches them, returns a Result
figures         medians, tables and the report of a run
"""
