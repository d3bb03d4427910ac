// SPDX-License-Identifier: Apache-2.0
// What a reader of this page would stumble over, as a list of sentences; tools/screenshots.py asks the browser for it.
(() => {
  const LEAST = 10.95, CONTRAST = 4.5;
  const found = [];
  const short = (text) => JSON.stringify(text.trim().replace(/\s+/g, ' ').slice(0, 40));
  const colour = (value) => {
    const parts = (value.match(/[\d.]+/g) || []).map(Number);
    return parts.length < 3 ? null : [...parts.slice(0, 3), parts.length > 3 ? parts[3] : 1];
  };
  const over = (top, below) => top.slice(0, 3).map((part, at) => part * top[3] + below[at] * (1 - top[3]));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const own = colour(getComputedStyle(at).backgroundColor);
      if (own && own[3] > 0) layers.push(own);
      if (own && own[3] === 1) break;
    }
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    let base = layers.length && layers[layers.length - 1][3] === 1 ? layers.pop().slice(0, 3) : dark ? [18, 18, 18] : [255, 255, 255];
    while (layers.length) base = over(layers.pop(), base);
    return base;
  };
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
  const crosses = (box, x1, y1, x2, y2) => {
    let from = 0, to = 1;
    for (const [start, delta, low, high] of [[x1, x2 - x1, box.left, box.right], [y1, y2 - y1, box.top, box.bottom]]) {
      if (Math.abs(delta) < 1e-9) {
        if (start <= low || start >= high) return false;
        continue;
      }
      const [a, b] = [(low - start) / delta, (high - start) / delta].sort((p, q) => p - q);
      from = Math.max(from, a);
      to = Math.min(to, b);
    }
    return from < to;
  };
  const put = (svg, x, y) => {
    const point = svg.ownerSVGElement ? svg.ownerSVGElement.createSVGPoint() : svg.createSVGPoint();
    point.x = x;
    point.y = y;
    return point.matrixTransform(svg.getScreenCTM());
  };

  if (document.documentElement.scrollWidth > innerWidth + 1) {
    found.push(`the page is ${document.documentElement.scrollWidth} px wide in a window of ${innerWidth}`);
  }

  for (const svg of document.querySelectorAll('svg.chart,svg.picture')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const marks = [...svg.querySelectorAll('rect,circle,polygon,line,path,text')];
    const order = new Map(marks.map((mark, at) => [mark, at]));
    const words = [...svg.querySelectorAll('text')].filter((one) => one.textContent.trim());
    const boxes = words.map((one) => {
      const box = one.getBBox(), scale = one.getScreenCTM().a, size = parseFloat(getComputedStyle(one).fontSize);
      const corner = put(one, box.x, box.y), base = put(one, 0, parseFloat(one.getAttribute('y')));
      // Letters without the room above and below them.
      return { one, size: size * scale, left: corner.x, right: corner.x + box.width * scale,
               top: base.y - size * scale * 0.72, bottom: base.y + size * scale * 0.12 };
    });
    const shapes = marks.filter((one) => ['rect', 'circle', 'polygon'].includes(one.tagName));
    const lines = marks.filter((one) => one.tagName === 'line').map((one) => {
      const [a, b] = [put(one, +one.getAttribute('x1'), +one.getAttribute('y1')), put(one, +one.getAttribute('x2'), +one.getAttribute('y2'))];
      return { one, x1: a.x, y1: a.y, x2: b.x, y2: b.y };
    });
    for (const path of svg.querySelectorAll('path.line')) {
      const whole = path.getTotalLength(), parts = Math.min(600, Math.ceil(whole / 4));
      for (let at = 0; at < parts; at++) {
        const a = path.getPointAtLength(whole * at / parts), b = path.getPointAtLength(whole * (at + 1) / parts);
        if (Math.hypot(a.x - b.x, a.y - b.y) > 3 * whole / parts) continue;
        const [p, q] = [put(path, a.x, a.y), put(path, b.x, b.y)];
        lines.push({ one: path, x1: p.x, y1: p.y, x2: q.x, y2: q.y });
      }
    }
    boxes.forEach((box, at) => {
      const text = short(box.one.firstChild && box.one.firstChild.tagName === 'title' ? box.one.lastChild.textContent : box.one.textContent);
      if (box.size < LEAST) found.push(`${text} is ${box.size.toFixed(1)} px high`);
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) {
        found.push(`${text} is cut off by its picture`);
      }
      for (const other of boxes.slice(at + 1)) {
        const less = { left: box.left + 1, right: box.right - 1, top: box.top, bottom: box.bottom };
        if (!apart(less, other)) found.push(`${text} lies over ${short(other.one.textContent)}`);
      }
      const inside = { left: box.left + 1, right: box.right - 1, top: box.top + 1, bottom: box.bottom - 1 };
      const crossed = lines.find((line) => crosses(inside, line.x1, line.y1, line.x2, line.y2));
      const halo = getComputedStyle(box.one).paintOrder.startsWith('stroke');
      if (crossed && !(halo && order.get(crossed.one) < order.get(box.one))) found.push(`${text} is crossed by a line`);
      const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
      let behind = ground(svg.parentElement || svg);
      if (!svg.parentElement || getComputedStyle(svg).backgroundColor !== 'rgba(0, 0, 0, 0)') behind = ground(svg);
      for (const shape of shapes) {
        if (order.get(shape) > order.get(box.one)) break;
        const place = shape.getBoundingClientRect(), style = getComputedStyle(shape);
        if (place.left > x || place.right < x || place.top > y || place.bottom < y || style.fill === 'none') continue;
        const fill = colour(style.fill);
        if (!fill) continue;
        behind = over([...fill.slice(0, 3), fill[3] * parseFloat(style.fillOpacity)], behind);
        if (shape.tagName === 'circle') found.push(`${text} lies over a dot`);
        if (!shape.classList.contains('hit') && (box.left < place.left - 2 || box.right > place.right + 2)) {
          found.push(`${text} is wider than the box it stands in`);
        }
      }
      const style = getComputedStyle(box.one), ink = colour(style.fill);
      if (ink && contrast(over(ink, behind), behind) < CONTRAST) {
        found.push(`${text} has a contrast of ${contrast(over(ink, behind), behind).toFixed(1)}`);
      }
    });
  }

  const walker = document.createTreeWalker(document.body || document.documentElement, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest('svg,script,style,noscript,template')) continue;
    const style = getComputedStyle(parent), range = document.createRange();
    range.selectNodeContents(node);
    const place = range.getBoundingClientRect();
    if (!place.width || style.visibility === 'hidden' || parent.closest('details:not([open]) > :not(summary)')) continue;
    let opacity = 1;
    for (let at = parent; at; at = at.parentElement) opacity *= parseFloat(getComputedStyle(at).opacity);
    if (opacity < 0.05) continue;
    const text = short(node.textContent), size = parseFloat(style.fontSize), behind = ground(parent);
    const say = (words) => { if (!seen.has(words)) found.push(words); seen.add(words); };
    if (size < LEAST) say(`${text} is ${size.toFixed(1)} px high`);
    const ink = colour(style.color), ratio = contrast(over([...ink.slice(0, 3), ink[3] * opacity], behind), behind);
    if (ratio < CONTRAST && !parent.closest('.md-header,.md-footer,.md-tabs')) say(`${text} has a contrast of ${ratio.toFixed(1)}`);
    for (let at = parent; at; at = at.parentElement) {
      const flow = getComputedStyle(at), edge = at.getBoundingClientRect();
      if (flow.overflowX === 'auto' || flow.overflowX === 'scroll') break;
      if (flow.overflowX === 'hidden' && place.right > edge.right + 1 && edge.width > 1) { say(`${text} is cut off`); break; }
    }
  }

  for (const image of document.querySelectorAll('img[src$=".svg"]')) {
    const place = image.getBoundingClientRect();
    if (place.width && image.naturalWidth && place.width < image.naturalWidth * 0.99) {
      found.push(`${image.getAttribute('src')} is shrunk to ${(100 * place.width / image.naturalWidth).toFixed(0)}%`);
    }
  }
  return found;
})()
