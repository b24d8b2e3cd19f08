"""The stages, in torch.

A stream must say the same alone and beside others, bit for bit.  Intel's matrix library promises that only if it is
asked to, before its first product: then the rows of a product do not depend on how many there are (Conditional
Numerical Reproducibility, strict mode; Intel oneMKL developer guide).  It costs a tenth of a small product's time, and
saves three quarters of it, since no step need be padded.  Other libraries take no notice.
"""

import os

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
