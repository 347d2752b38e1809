"""`python -m benchmarks NAME`, in a checkout."""

from benchmarks.main import main

if __name__ == "__main__":
    raise SystemExit(main())
