"""Studies whose commands are those of `cute-flash`, and the modules that they use. docs/how-it-works.md explains them.

    loops        `tiled_q_outer`, `tiled_kv_outer`: the loop orders of FlashAttention 2 and 1 in torch, counting bytes
    loop_order   `cute-flash loops`: a model of both loop orders on a GPU
    tile_choice  `cute-flash tiles`: the tiles that fit a GPU, beside the tile of the kernel
    cp_cost      a cost model of context parallelism
    explain_cp   `cute-flash explain --cp`: the costs of each method
    mla_cost     a cost model of MLA decode (`python -m layouts.studies.mla_cost`), for profiling/notes/mla.md

They are no part of the wheel.
"""
