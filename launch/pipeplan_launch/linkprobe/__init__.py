"""Link benchmark: times messages and all-reduces between workers, sent in the way that the executor sends them.

    settings    options and results of the benchmark
    meeting     rendezvous of the workers, which names ranks that do not come
    turns       the pairs and groups that are measured at the same time
    traffic     one message or all-reduce, and its times over sizes
    survey      measures all pairs first, then every level of the cluster
    parting     finds out which worker was lost during the benchmark
    joined      one worker of the benchmark, as torchrun starts it
    here        all workers on this machine, without a launcher

The caller provides the function that finds the cluster's levels in the rates of pairs.
"""
