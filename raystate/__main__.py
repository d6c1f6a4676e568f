"""python -m raystate"""

from raystate.cli import main

if __name__ == "__main__":
    main()
