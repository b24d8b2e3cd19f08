"""`python -m breeze_rtc` is `breeze-rtc`."""

from breeze_rtc.cli import main

main()
