"""Tests of other projects, run through the adapters of cute_flash.

    python -m tests.upstream fa --sources DIR --out DIR      # flash-attention's tests: integrations.flash_attn
    python -m tests.upstream sdpa --sources DIR --out DIR    # torch's tests of SDPA: integrations.sdpa
    python -m tests.upstream flex --sources DIR --out DIR    # mods of attention-gym and others: flex_attention

    [--processes N] [--seconds LIMIT] [--mods A,B] [step ...]

No file of these projects is part of this repository. `--sources` is a folder with them; einops and expecttest,
which the tests import, come from pip:

    git clone --depth 1 --branch v2.8.3 https://github.com/Dao-AILab/flash-attention DIR/flash-attention
    curl --create-dirs -o DIR/pytorch/test/test_transformers.py \\
        https://raw.githubusercontent.com/pytorch/pytorch/v2.11.0/test/test_transformers.py
    git clone https://github.com/meta-pytorch/attention-gym DIR/attention-gym
    git -C DIR/attention-gym checkout 7fdb85d
    pip install einops expecttest

Take test_transformers.py from the version of the installed torch.

Steps, in order; all of them by default:

    record     call every case without launches and record which kernels it needs
    compile    compile the recorded kernels in parallel into OUT/cache (or CUTE_FLASH_CACHE_DIR)
    run        (fa, sdpa) run the cases, one process per shard, each with the limit of --seconds
    inactive   (sdpa) run a few cases after the adapter was activated and restored
    check      (flex) compare results and gradients with fp32 and with compiled FlexAttention
    time       (flex) time 12 mods beside compiled FlexAttention, alone on the GPU

On an H200 with 16 cores, compiling took 82 s for fa, 25 s for sdpa and 96 s for flex; `run` of sdpa took 37 s, and
`check` of flex 95 s. `run` of fa has not been timed. Recording and running of fa, and recording of flex, also work
without a GPU: recording all of fa takes 4 minutes in one process.

Results: junit files or JSON, logs and recorded keys in OUT/SUITE/STEP, one per process; OUT/summary_SUITE.txt. The
command fails if a case fails in a way that is not an expected difference, or if a process does not finish. Expected
differences, with their reasons, are `ZERO_DQ` in fa.py, `EXPECTED` in sdpa.py and `REFUSED` in flex_mods.py.
"""
