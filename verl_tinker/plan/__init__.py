"""What a preset takes before anything is started: `python -m verl_tinker.plan`.

Owns the counting of GPUs and the estimates of memory. Starts nothing, and needs no GPU.
"""
