"""What a GPU does with many numbers at once: cast, pack, gather and update them.

Each file has a Triton kernel beside its twin in plain torch.  Both give the same bits (of what is not a number, which
says nothing by its digits, only that it stays so): numbers are rounded in integers, so that no machine's own
instructions have a say.  On a CPU the twin runs; on a GPU what was measured to be faster (`ways.py`).

The kernels run under Triton's interpreter in the tests, and are compiled there for a GPU.  None has run on one yet.
Nothing is imported here: Triton takes half a second to, and a CPU has no use for it.
"""
