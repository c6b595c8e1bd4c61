"""The site: pages that are made from the code and from stored reports, beside those that people write."""
