"""The storage engine of latentkv and its client library. No torch in here."""
