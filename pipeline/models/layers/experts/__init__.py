"""Parts of a mixture of experts: router, dispatch of tokens to experts, grouped products, sum.

One file for each part, small functions of arrays that a layer of one's own may use too. No file
format and no schedule is known here, and nothing reduces a gradient: a pipeline does.
"""
