"""python -m raystate.cli"""

from raystate.cli import main

main()
