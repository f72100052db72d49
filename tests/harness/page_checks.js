// Run in a page by page_checks.py: returns the page's faults as a list of sentences.
([minContrast, minLarge, minTarget]) => {
  const faults = [];
  const where = (node) => `${node.nodeName.toLowerCase()}.${node.getAttribute("class") ?? ""} ${JSON.stringify(node.textContent.trim().slice(0, 40))}`;
  const colour = (text) => {
    const parts = (text.match(/[\d.]+(?:e-?\d+)?/g) ?? []).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1;
    return { r: parts[0] * scale, g: parts[1] * scale, b: parts[2] * scale, a: parts[3] ?? 1 };
  };
  const over = (top, under) => ({ r: top.r * top.a + under.r * (1 - top.a), g: top.g * top.a + under.g * (1 - top.a), b: top.b * top.a + under.b * (1 - top.a), a: 1 });
  const light = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((value) => { const part = value / 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    const layers = [];
    for (let each = node; each; each = each.parentElement) layers.push(colour(getComputedStyle(each).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), { r: 255, g: 255, b: 255, a: 1 });
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || node.closest(".unseen, .skip, script, noscript, option, thead") && !node.closest("thead .sort")) continue;
    const box = node.getBoundingClientRect();
    const style = getComputedStyle(node);
    if (box.width < 2 || box.height < 2 || style.visibility === "hidden" || node.closest("thead")?.getBoundingClientRect().width < 2) continue;
    const svg = node.namespaceURI.endsWith("svg");
    const back = ground(svg ? node.ownerSVGElement.parentElement : node);
    const front = over(colour(svg ? style.fill : style.color), back);
    const [high, low] = [light(front), light(back)].sort((one, other) => other - one);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    texts += 1;
    if (!(ratio >= (large ? minLarge : minContrast))) faults.push(`contrast ${ratio.toFixed(2)}: ${where(node)}`);
  }
  if (texts < 10) faults.push(`only ${texts} texts are visible`);
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) faults.push(`two nodes have the id ${id}`);
  for (const name of ["aria-labelledby", "aria-describedby", "for"]) {
    for (const node of document.querySelectorAll(`[${name}]`)) {
      for (const id of node.getAttribute(name).split(" ")) if (!document.getElementById(id)) faults.push(`${name}=${id} leads nowhere`);
    }
  }
  let level = 0;
  for (const node of document.querySelectorAll("main h1, main h2, main h3, main h4")) {
    const next = Number(node.nodeName[1]);
    if (next > level + 1) faults.push(`heading ${where(node)} comes after level ${level}`);
    level = next;
  }
  for (const [selector, number] of [["main", 1], ["h1", 1], ["header", 1], ["[aria-current=page]:not(.tabs a)", 1]]) {
    const found = document.querySelectorAll(selector).length;
    if (found !== number) faults.push(`${found} × ${selector}`);
  }
  for (const row of document.querySelectorAll("thead tr")) {
    if (row.querySelectorAll('[aria-sort="ascending"], [aria-sort="descending"]').length > 1) faults.push("a table sorted by two columns");
  }
  for (const node of document.querySelectorAll("button, select, input")) {
    const box = node.getBoundingClientRect();
    if (box.height > 2 && box.width > 2 && (box.height < minTarget || box.width < minTarget)) faults.push(`${Math.round(box.width)}×${Math.round(box.height)} px: ${where(node)}`);
  }
  if (document.documentElement.lang !== "en") faults.push("the page has no language");
  if (document.documentElement.scrollWidth > innerWidth) faults.push(`${document.documentElement.scrollWidth} px wide on a screen of ${innerWidth}`);
  return faults;
}
