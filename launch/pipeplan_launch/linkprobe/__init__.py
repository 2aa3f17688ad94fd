"""Measures what messages and all-reduces between workers take, the way that the executor sends them.

    meeting     who is there: every process says where it runs; a rank that does not come is named
    turns       which pairs and groups are measured at the same time
    traffic     one message, one all-reduce, and their times over sizes
    survey      all pairs first, then every level that was found
    parting     when a worker is lost meanwhile: which
    joined      one worker, as torchrun starts it
    here        all of them on this machine, without a launcher
    settings    what is asked and answered

Finding levels in what pairs reach is the caller's: a survey asks a function for them.
"""
