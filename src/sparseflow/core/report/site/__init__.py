"""One static site of runs and claims: front, run pages, comparisons of runs and the history of claims.

The site opens from disk. Each of its files is a page of `core.report`, which requests nothing and is readable
without scripts, or a file of samples. ::

    OUT/index.html                    claims beside what is not met, and all runs
    OUT/runs/<name>/index.html        results, command, environment and samples of a run
    OUT/compare.html                  verdict of each pair of runs of one kind
    OUT/compare/<new>--<old>.html     one comparison
    OUT/history.html                  values of each claim over revisions
    OUT/site.json                     list of the runs
"""

from sparseflow.core.report.site.build import SiteResult, build_site

__all__ = ["SiteResult", "build_site"]
