"""What every recurrence over a pool of states shares: the arguments of a pass, its loops, its ring, its kernels.

A recurrence adds its inputs, one step rule, its chunked form and what a kernel's program computes of a token.
"""
