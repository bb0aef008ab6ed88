"""What joins the two slices: buffer, ledger, weight transfer, supervisor."""
