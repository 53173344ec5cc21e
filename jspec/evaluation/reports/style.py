"""The look of a report: dark on white, a readable width, fit for a phone and for print."""

STYLE = """\
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1c1c1c;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
p, ul, ol, dl, pre, figcaption { max-width: 48rem; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0.5rem 0 1rem; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 2.75rem 0 0.75rem; padding-top: 0.75rem;
  border-top: 1px solid #d5d5d5; }
h3 { font-size: 1.1rem; margin: 1.75rem 0 0.5rem; }
p, ul, dl, pre { margin: 0.75rem 0; }
li { margin: 0.25rem 0; }
a { color: #0b4f9e; }
code { font: 0.9em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  background: #f1f1f1; border-radius: 3px; padding: 0.05em 0.3em; overflow-wrap: anywhere; }
pre { background: #f6f6f6; border: 1px solid #ddd; border-radius: 4px; padding: 0.75rem 1rem;
  overflow-x: auto; }
pre code { background: none; padding: 0; white-space: pre-wrap; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; }
nav { font-size: 0.95rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 1rem; }
dt { font-weight: 600; }
dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; margin: 0.5rem 0; }
caption { text-align: left; font-weight: 600; padding: 0.5rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.85rem 0.3rem 0;
  border-bottom: 1px solid #e4e4e4; }
thead th { border-bottom: 2px solid #777; vertical-align: bottom; font-weight: 600; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.number { white-space: normal; }
td code, th code { white-space: nowrap; }
.note, figcaption { font-size: 0.9rem; color: #4a4a4a; }
figure { margin: 1.5rem 0; }
figure svg { display: block; width: 100%; min-width: 32rem; max-width: 46rem; height: auto; }
.trace { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; }
.trace b { font-weight: 700; color: #0b3d91; border-bottom: 3px double #0b3d91; }
.trace i { font-style: normal; color: #1c5e20; border-bottom: 2px solid #1c5e20; }
.trace s { color: #a11515; text-decoration: line-through; }
.trace s.dropped { color: #767676; text-decoration: line-through dotted; }
ol.trace { padding-left: 2.75rem; }
ol.trace li { border-bottom: 1px solid #eee; margin: 0; padding: 0.1rem 0; }
@media (max-width: 40rem) {
  main { padding: 0.75rem 0.9rem 3rem; }
  h1 { font-size: 1.4rem; }
  dl { display: block; }
  dd { margin: 0 0 0.5rem; }
}
@media print {
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  h2 { break-after: avoid; }
  table, figure, pre { break-inside: avoid; }
  .wide { overflow: visible; }
  figure svg { min-width: 0; }
}
"""
