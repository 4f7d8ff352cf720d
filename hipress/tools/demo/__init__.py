"""`hipress demo`: a real training run over throttled links, with and without compression.

corpus, model   the workload: a word-level LSTM on the standard library's source
methods         the synchronization: PyTorch's baselines and HiPress codecs
worker          one rank: trains, counts bytes, reports events as JSON lines
netns, place    the places of ranks: network namespaces on throttled links, or loopback
runner          starts the ranks of one method, watches them, returns a Result
report          medians, table and JSON; chart draws the PNG
command         the command line
"""
