"""`recollect view`: a data set in the browser; `catalogue` is what can be asked of it, `site` the page over it."""
