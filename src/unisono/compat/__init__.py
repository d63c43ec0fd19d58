"""Other libraries' spellings: programs written for them run after one changed import line."""
