"""AutoSparse Net: a learned cost model that reads a matrix's pattern and ranks schedules by speed."""
