from compll.runtime import cache as cache  # first: it takes the digest of what is imported
