"""`python -m quant_gru` runs `quant-gru`."""

from quant_gru.cli import main

if __name__ == "__main__":
    main()
