"""Parts shared by all kernels. Each works on the (m, n) view of an accumulator, on lengths, or on block
order.
"""
