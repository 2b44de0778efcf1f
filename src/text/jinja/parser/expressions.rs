//! Parses expressions, by increasing precedence.

use super::super::ast::{Arguments, Comparison, Constant, Expr, ExprId, Modifier, Operator};
use super::super::failure::Result;
use super::super::lexer::Token;
use super::{MAX_EXPRESSION_DEPTH, Parser, too_deep};

impl Parser {
    /// Adds an expression whose parts are in the tree, and checks its depth.
    pub(super) fn add(&mut self, expr: Expr) -> Result<ExprId> {
        let mut deepest = 0;
        let depths = &self.depths;
        children(&expr, &mut |child| deepest = deepest.max(depths[child.0 as usize]));
        if deepest as usize >= MAX_EXPRESSION_DEPTH {
            return Err(too_deep().at(self.line()));
        }
        self.tree.expressions.push(expr);
        self.depths.push(deepest + 1);
        Ok(ExprId(self.tree.expressions.len() as u32 - 1))
    }

    fn recurse(&mut self, parse: impl FnOnce(&mut Parser) -> Result<ExprId>) -> Result<ExprId> {
        self.enter()?;
        let parsed = parse(self)?;
        self.recursion -= 1;
        Ok(parsed)
    }

    pub(super) fn expression(&mut self) -> Result<ExprId> {
        self.recurse(Parser::conditional)
    }

    /// Parses an expression, or a tuple of several separated by commas.
    pub(super) fn tuple(&mut self, with_conditional: bool, ends: &[&str]) -> Result<ExprId> {
        self.tuple_or_expression(with_conditional, ends, false)
    }

    fn tuple_or_expression(&mut self, with_conditional: bool, ends: &[&str], in_parentheses: bool) -> Result<ExprId> {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            let ended = matches!(self.peek(), Token::VariableEnd | Token::BlockEnd) || self.at_symbol(")");
            if ended || ends.iter().any(|end| self.at_word(end)) {
                break;
            }
            items.push(if with_conditional { self.expression()? } else { self.recurse(Parser::or)? });
            if !self.skip_symbol(",") {
                break;
            }
            is_tuple = true;
        }
        match items[..] {
            [single] if !is_tuple => Ok(single),
            [] if !in_parentheses => self.unexpected("an expression"),
            _ => self.add(Expr::Tuple(items)),
        }
    }

    fn conditional(&mut self) -> Result<ExprId> {
        let mut value = self.or()?;
        while self.skip_word("if") {
            let outer = std::mem::replace(&mut self.in_branch, true);
            let test = self.or()?;
            let no = if self.skip_word("else") { Some(self.recurse(Parser::conditional)?) } else { None };
            self.in_branch = outer;
            value = self.add(Expr::Conditional { test, yes: value, no })?;
        }
        Ok(value)
    }

    fn or(&mut self) -> Result<ExprId> {
        let mut left = self.and()?;
        while self.skip_word("or") {
            let right = self.and()?;
            left = self.add(Expr::Or(left, right))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<ExprId> {
        let mut left = self.not()?;
        while self.skip_word("and") {
            let right = self.not()?;
            left = self.add(Expr::And(left, right))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<ExprId> {
        if self.skip_word("not") {
            let value = self.recurse(Parser::not)?;
            return self.add(Expr::Not(value));
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Result<ExprId> {
        let first = self.sum()?;
        let mut others = Vec::new();
        while let Some(comparison) = self.skip_comparison() {
            others.push((comparison, self.sum()?));
        }
        if others.is_empty() { Ok(first) } else { self.add(Expr::Compare(first, others)) }
    }

    fn skip_comparison(&mut self) -> Option<Comparison> {
        let (comparison, tokens) = match self.peek() {
            Token::Symbol("==") => (Comparison::Equal, 1),
            Token::Symbol("!=") => (Comparison::NotEqual, 1),
            Token::Symbol("<") => (Comparison::Less, 1),
            Token::Symbol("<=") => (Comparison::LessOrEqual, 1),
            Token::Symbol(">") => (Comparison::Greater, 1),
            Token::Symbol(">=") => (Comparison::GreaterOrEqual, 1),
            Token::Name(name) if name == "in" => (Comparison::In, 1),
            Token::Name(name) if name == "not" && matches!(self.peek_second(), Token::Name(next) if next == "in") => (Comparison::NotIn, 2),
            _ => return None,
        };
        self.next += tokens;
        Some(comparison)
    }

    fn skip_operator(&mut self, operators: &[Operator]) -> Option<Operator> {
        let found = operators.iter().copied().find(|operator| self.at_symbol(operator.symbol()))?;
        self.next += 1;
        Some(found)
    }

    fn sum(&mut self) -> Result<ExprId> {
        let mut left = self.concat()?;
        while let Some(operator) = self.skip_operator(&[Operator::Add, Operator::Subtract]) {
            let right = self.concat()?;
            left = self.add(Expr::Binary(operator, left, right))?;
        }
        Ok(left)
    }

    fn concat(&mut self) -> Result<ExprId> {
        let first = self.product()?;
        if !self.at_symbol("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_symbol("~") {
            parts.push(self.product()?);
        }
        self.add(Expr::Concat(parts))
    }

    fn product(&mut self) -> Result<ExprId> {
        use Operator::{Divide, FloorDivide, Modulo, Multiply};
        let mut left = self.power()?;
        while let Some(operator) = self.skip_operator(&[Multiply, Divide, FloorDivide, Modulo]) {
            let right = self.power()?;
            left = self.add(Expr::Binary(operator, left, right))?;
        }
        Ok(left)
    }

    /// Parses powers. As in Jinja and unlike in Python, they group from the left.
    fn power(&mut self) -> Result<ExprId> {
        let mut left = self.unary(true)?;
        while self.skip_symbol("**") {
            let right = self.unary(true)?;
            left = self.add(Expr::Binary(Operator::Power, left, right))?;
        }
        Ok(left)
    }

    fn unary(&mut self, with_filters: bool) -> Result<ExprId> {
        let mut value = if self.skip_symbol("-") {
            let value = self.recurse(|parser| parser.unary(false))?;
            self.add(Expr::Negative(value))?
        } else if self.skip_symbol("+") {
            let value = self.recurse(|parser| parser.unary(false))?;
            self.add(Expr::Positive(value))?
        } else {
            self.primary()?
        };
        value = self.postfix(value)?;
        if with_filters { self.filters_and_tests(value) } else { Ok(value) }
    }

    fn primary(&mut self) -> Result<ExprId> {
        match self.peek() {
            Token::Symbol("(") => {
                self.next += 1;
                let value = self.tuple_or_expression(true, &[], true)?;
                self.expect_symbol(")")?;
                return Ok(value);
            }
            Token::Symbol("[") => return self.list(),
            Token::Symbol("{") => return self.dict(),
            Token::Name(_) | Token::Str(_) | Token::Int(_) | Token::Float(_) => {}
            _ => return self.unexpected("an expression"),
        }
        match self.advance() {
            Token::Int(number) => self.add(Expr::Constant(Constant::Int(number))),
            Token::Float(number) => self.add(Expr::Constant(Constant::Float(number))),
            Token::Name(name) => self.name_or_constant(&name),
            Token::Str(mut text) => {
                while let Token::Str(more) = self.peek() {
                    text.push_str(more);
                    self.next += 1;
                }
                self.add(Expr::Constant(Constant::Str(text)))
            }
            _ => self.unexpected("an expression"),
        }
    }

    fn name_or_constant(&mut self, name: &str) -> Result<ExprId> {
        let constant = match name {
            "true" | "True" => Some(Constant::Bool(true)),
            "false" | "False" => Some(Constant::Bool(false)),
            "none" | "None" => Some(Constant::None),
            _ => None,
        };
        if let Some(constant) = constant {
            return self.add(Expr::Constant(constant));
        }
        for takes in &mut self.macros {
            takes.caller |= name == "caller";
            takes.varargs |= name == "varargs";
            takes.kwargs |= name == "kwargs";
        }
        let name = self.intern(name);
        self.add(Expr::Name(name))
    }

    fn list(&mut self) -> Result<ExprId> {
        self.expect_symbol("[")?;
        let mut items = Vec::new();
        while !self.skip_symbol("]") {
            items.push(self.expression()?);
            if !self.at_symbol("]") {
                self.expect_symbol(",")?;
            }
        }
        self.add(Expr::List(items))
    }

    fn dict(&mut self) -> Result<ExprId> {
        self.expect_symbol("{")?;
        let mut items = Vec::new();
        while !self.skip_symbol("}") {
            let key = self.expression()?;
            self.expect_symbol(":")?;
            items.push((key, self.expression()?));
            if !self.at_symbol("}") {
                self.expect_symbol(",")?;
            }
        }
        self.add(Expr::Dict(items))
    }

    fn postfix(&mut self, mut value: ExprId) -> Result<ExprId> {
        loop {
            value = match self.peek() {
                Token::Symbol(".") => self.attribute(value)?,
                Token::Symbol("[") => self.subscript(value)?,
                Token::Symbol("(") => self.call(value)?,
                _ => return Ok(value),
            }
        }
    }

    fn filters_and_tests(&mut self, mut value: ExprId) -> Result<ExprId> {
        loop {
            value = match self.peek() {
                Token::Symbol("|") => {
                    self.next += 1;
                    let filter = self.modifier_filter()?;
                    self.add(Expr::Filter(value, filter))?
                }
                Token::Name(name) if name == "is" => self.test(value)?,
                Token::Symbol("(") => self.call(value)?,
                _ => return Ok(value),
            }
        }
    }

    fn call(&mut self, callee: ExprId) -> Result<ExprId> {
        let arguments = self.arguments()?;
        self.add(Expr::Call(callee, arguments))
    }

    fn attribute(&mut self, value: ExprId) -> Result<ExprId> {
        self.next += 1;
        match self.advance() {
            Token::Name(name) => self.add(Expr::Attribute(value, name)),
            Token::Int(index) => {
                let index = self.add(Expr::Constant(Constant::Int(index)))?;
                self.add(Expr::Item(value, index))
            }
            _ => self.fail("expected name or number after '.'"),
        }
    }

    fn subscript(&mut self, value: ExprId) -> Result<ExprId> {
        self.next += 1;
        let mut indices = Vec::new();
        while !self.at_symbol("]") {
            if !indices.is_empty() {
                self.expect_symbol(",")?;
            }
            indices.push(self.index_or_slice()?);
        }
        self.next += 1;
        let index = match indices[..] {
            [single] => single,
            _ => self.add(Expr::Tuple(indices))?,
        };
        self.add(Expr::Item(value, index))
    }

    fn index_or_slice(&mut self) -> Result<ExprId> {
        let start = if self.at_symbol(":") { None } else { Some(self.expression()?) };
        if !self.skip_symbol(":") {
            return start.map_or_else(|| self.unexpected("an index"), Ok);
        }
        let ended = |parser: &Parser| parser.at_symbol("]") || parser.at_symbol(",");
        let stop = if self.at_symbol(":") || ended(self) { None } else { Some(self.expression()?) };
        let step = if self.skip_symbol(":") && !ended(self) { Some(self.expression()?) } else { None };
        self.add(Expr::Slice(start, stop, step))
    }

    pub(super) fn arguments(&mut self) -> Result<Arguments> {
        self.expect_symbol("(")?;
        let mut arguments = Arguments::default();
        let mut first = true;
        while !self.skip_symbol(")") {
            if !std::mem::replace(&mut first, false) {
                self.expect_symbol(",")?;
                if self.skip_symbol(")") {
                    break;
                }
            }
            self.argument(&mut arguments)?;
        }
        Ok(arguments)
    }

    fn argument(&mut self, arguments: &mut Arguments) -> Result<()> {
        let spread = arguments.spread.is_some() || arguments.spread_named.is_some();
        let named = matches!((self.peek(), self.peek_second()), (Token::Name(_), Token::Symbol("=")));
        let valid = if self.at_symbol("*") {
            self.next += 1;
            arguments.spread = Some(self.expression()?);
            !spread
        } else if self.at_symbol("**") {
            self.next += 1;
            let valid = arguments.spread_named.is_none();
            arguments.spread_named = Some(self.expression()?);
            valid
        } else if named {
            let name = self.expect_name()?;
            self.next += 1;
            let value = self.expression()?;
            arguments.named.push((name, value));
            arguments.spread_named.is_none()
        } else {
            arguments.positional.push(self.expression()?);
            !spread && arguments.named.is_empty()
        };
        if valid { Ok(()) } else { self.fail("invalid order of arguments in a call") }
    }

    fn test(&mut self, value: ExprId) -> Result<ExprId> {
        self.next += 1;
        let negated = self.skip_word("not");
        let name = self.dotted_name()?;
        self.check_test(&name)?;
        let mut arguments = Arguments::default();
        let starts_argument = match self.peek() {
            Token::Name(word) if word == "is" => return self.fail("tests cannot be chained with 'is'"),
            Token::Name(word) => !["else", "or", "and"].contains(&word.as_str()),
            Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Symbol("[" | "{") => true,
            _ => false,
        };
        if self.at_symbol("(") {
            arguments = self.arguments()?;
        } else if starts_argument {
            let argument = self.primary()?;
            arguments.positional.push(self.postfix(argument)?);
        }
        let test = self.add(Expr::Test(value, Modifier { name, arguments }))?;
        if negated { self.add(Expr::Not(test)) } else { Ok(test) }
    }
}

/// Calls `visit` for each expression directly below `expr`.
fn children(expr: &Expr, visit: &mut impl FnMut(ExprId)) {
    let arguments = |arguments: &Arguments, visit: &mut dyn FnMut(ExprId)| {
        arguments.positional.iter().for_each(|&id| visit(id));
        arguments.named.iter().for_each(|&(_, id)| visit(id));
        [arguments.spread, arguments.spread_named].into_iter().flatten().for_each(visit);
    };
    match expr {
        Expr::Constant(_) | Expr::Name(_) => {}
        Expr::List(items) | Expr::Tuple(items) | Expr::Concat(items) => items.iter().for_each(|&id| visit(id)),
        Expr::Dict(items) => items.iter().for_each(|&(key, value)| {
            visit(key);
            visit(value);
        }),
        Expr::Negative(value) | Expr::Positive(value) | Expr::Not(value) | Expr::Attribute(value, _) => visit(*value),
        Expr::And(left, right) | Expr::Or(left, right) | Expr::Binary(_, left, right) | Expr::Item(left, right) => {
            visit(*left);
            visit(*right);
        }
        Expr::Compare(first, others) => {
            visit(*first);
            others.iter().for_each(|&(_, id)| visit(id));
        }
        Expr::Conditional { test, yes, no } => {
            visit(*test);
            visit(*yes);
            no.iter().for_each(|&id| visit(id));
        }
        Expr::Slice(start, stop, step) => [start, stop, step].into_iter().flatten().for_each(|&id| visit(id)),
        Expr::Call(callee, with) => {
            visit(*callee);
            arguments(with, visit);
        }
        Expr::Filter(value, modifier) | Expr::Test(value, modifier) => {
            visit(*value);
            arguments(&modifier.arguments, visit);
        }
    }
}
