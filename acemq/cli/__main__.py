"""`python -m acemq.cli`: the same where no console script is on the path."""

from acemq.cli import main

if __name__ == "__main__":
    main()
